"""Right schedules done in another way: the court passes every one of them, and so does check."""

import numpy as np
import pytest
from faults.cases import Case, cases
from faults.changes import Edit
from faults.equivalent_steps import EQUIVALENTS

from zsim.proof import check

FEW = ("stage 0", "stage 2", "stage 3", "deepspeed 3", "fsdp2", "megatron overlapped", "pipelines")


@pytest.fixture(scope="module")
def some() -> list[Case]:
    return [case for column in FEW for case in cases(column)]


def need_right(case: Case, edit: Edit, rng: np.random.Generator) -> None:
    truth = case.truth(edit.made, rng)
    assert not truth.is_wrong, (edit.text, truth, case.strategy)
    assert check(edit.made, case.model) == (), (edit.text, case.strategy)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_another_way_to_do_the_same_is_right(name: str, some: list[Case]) -> None:
    made = [(case, edit) for case in some[::3] for edit in EQUIVALENTS[name](case.subject)]
    assert made
    rng = np.random.default_rng(0)
    for case, edit in made[:4]:
        assert edit.made != case.subject
        need_right(case, edit, rng)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EQUIVALENTS)
def test_no_right_schedule_is_refused(name: str, some: list[Case]) -> None:
    rng = np.random.default_rng(0)
    for case in some:
        for edit in EQUIVALENTS[name](case.subject):
            need_right(case, edit, rng)
