"""Right schedules done in another way: the court passes every one of them, and so does check."""

import numpy as np
import pytest
from edits.columns import Case, cases
from equivalents_of_steps import EQUIVALENTS

from zsim.proof import check

FEW = ("stage 0", "stage 2", "stage 3", "deepspeed 3", "fsdp2", "megatron overlapped", "pipelines")


@pytest.fixture(scope="module")
def some() -> list[Case]:
    return [case for column in FEW for case in cases(column)]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_another_way_to_do_the_same_is_right(name: str, some: list[Case]) -> None:
    made = [(case, edit) for case in some[::3] for edit in EQUIVALENTS[name](case.schedule)]
    assert made
    rng = np.random.default_rng(0)
    for case, edit in made[:4]:
        assert edit.schedule != case.schedule
        verdict = case.court.judge(edit.schedule, rng)
        assert not verdict.is_wrong, (edit.text, verdict, case.court.strategy)
        assert check(edit.schedule, case.model) == (), (edit.text, case.court.strategy)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_no_right_schedule_is_refused(name: str, some: list[Case]) -> None:
    rng = np.random.default_rng(0)
    for case in some:
        for edit in EQUIVALENTS[name](case.schedule):
            verdict = case.court.judge(edit.schedule, rng)
            assert not verdict.is_wrong, (edit.text, verdict, case.court.strategy)
            assert check(edit.schedule, case.model) == (), (edit.text, case.court.strategy)
