"""Mutants of drawn schedules: runs under any timing say of them what proofs say."""

import numpy as np
import pytest
from drawn import jobs
from drawn_examples import examples
from drawn_timings import DrawnTiming, timings
from faults.cases import Case
from faults.ground_truth import GroundTruth, Kind
from faults.happens_before import Graph
from faults.judge import Outcome, judge
from faults.of_schedules.registry import AT_EVERY_PLACE, ScheduleFault
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy

Drawn = tuple[Model, Strategy]


@examples(15)
@given(jobs(max_data=3, max_tensor=1))
def test_accesses_of_a_right_schedule_have_an_order(job: Drawn) -> None:
    made = make_schedule(*job)
    for overflow_steps in GroundTruth(made, *job).overflows:
        assert list(Graph(made, overflow_steps).races()) == []


@pytest.mark.one_commit_in(8)
@examples(25)
@given(jobs(max_data=2, max_tensor=1), st.sampled_from(AT_EVERY_PLACE), st.data(), timings())
def test_a_mutant_without_races_that_is_right_once_is_right_under_any_timing(
    job: Drawn, fault: ScheduleFault, data: st.DataObject, timing: DrawnTiming
) -> None:
    case = Case("drawn", *job)
    mutants = list(fault.mutants(case.subject))
    assume(mutants)
    try:
        made = data.draw(st.sampled_from(mutants)).made
    except ValueError:
        return
    if case.truth(made, np.random.default_rng(0)).kind is Kind.HARMLESS:
        for overflow_steps in case.ground_truth.overflows:
            truth = case.ground_truth.run(made, timing, overflow_steps=overflow_steps)
            assert truth is None or not truth.is_wrong, truth


@pytest.mark.one_commit_in(3)
@examples(40)
@given(jobs(max_data=2, max_tensor=2), st.sampled_from(AT_EVERY_PLACE), st.data())
def test_what_check_passes_no_timing_breaks(
    job: Drawn, fault: ScheduleFault, data: st.DataObject
) -> None:
    case = Case("drawn", *job)
    mutants = list(fault.mutants(case.subject))
    assume(mutants)
    verdict = judge(fault, data.draw(st.sampled_from(mutants)), case)
    assert verdict.outcome is not Outcome.MISSED, verdict


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000)
@given(jobs())
def test_two_thousand_right_schedules_are_passed(job: Drawn) -> None:
    assert check(make_schedule(*job), job[0]) == ()
