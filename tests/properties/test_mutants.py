"""Schedules with a planted fault: what runs with values say of them, and what check does."""

import pytest
from drawn import jobs
from drawn_examples import examples
from drawn_timings import DrawnTiming, timings
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from mutants import OPERATORS, Operator
from mutants.races import Graph
from mutants.table import cases, column, lines, strategies
from mutants.verdict import EFFECTIVE, Court, Kind

from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy

Drawn = tuple[Model, Strategy]
STAGES = [f"stage {stage}" for stage in range(4)]
COLUMNS = list(strategies())
WANTED = 30
NAMED_MIN = 0.98
"""Of the mutants of a column that are wrong, at how many a finding points."""


@examples(15)
@given(jobs(max_data=3, max_tensor=1))
def test_accesses_of_a_right_schedule_have_an_order(job: Drawn) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    assert list(Graph(made, Court(made, model, strategy).overflow_steps).races()) == []


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", COLUMNS)
def test_accesses_of_schedules_that_mutants_are_made_of_have_an_order(name: str) -> None:
    for case in cases(name, strategies()[name]):
        assert list(Graph(case.schedule, case.court.overflow_steps).races()) == []


@examples(25)
@given(jobs(max_data=2, max_tensor=1), st.sampled_from(OPERATORS), st.data(), timings())
def test_a_mutant_that_is_proved_harmless_is_right_under_any_timing(
    job: Drawn, operator: Operator, data: st.DataObject, timing: DrawnTiming
) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    mutants = list(operator.sites(made))
    assume(mutants)
    court = Court(made, model, strategy)
    verdict = court.judge(data.draw(st.sampled_from(mutants)))
    if verdict.kind is Kind.HARMLESS:
        assert verdict.schedule is not None
        assert court.run(verdict.schedule, timing) is None


@examples(40)
@given(jobs(max_data=2, max_tensor=2), st.sampled_from(OPERATORS), st.data())
def test_what_check_passes_no_timing_breaks(
    job: Drawn, operator: Operator, data: st.DataObject
) -> None:
    model, strategy = job
    made = make_schedule(model, strategy)
    mutants = list(operator.sites(made))
    assume(mutants)
    verdict = Court(made, model, strategy).judge(data.draw(st.sampled_from(mutants)))
    if verdict.schedule is not None and check(verdict.schedule, model) == ():
        assert verdict.kind not in EFFECTIVE, verdict.why


@pytest.mark.matrix(4)
@pytest.mark.parametrize("name", STAGES)
def test_a_few_mutants_of_every_operator_are_found(name: str) -> None:
    for each in column(name, wanted=1, tries=3):
        assert each.caught == each.effective, each.missed


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(max_examples=2000)
@given(jobs())
def test_two_thousand_right_schedules_are_passed(job: Drawn) -> None:
    assert check(make_schedule(*job), job[0]) == ()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COLUMNS)
def test_thirty_mutants_of_every_operator_are_found(name: str) -> None:
    for case in cases(name, strategies()[name]):
        assert check(case.schedule, case.model) == ()
    cells = list(column(name, wanted=WANTED, tries=10 * WANTED))
    print(f"\n{name}", *lines(cells), sep="\n")  # noqa: T201 (the table is what this run is for)
    for each in cells:
        assert each.effective == WANTED or each.is_exhausted
        assert each.caught == each.effective, each.missed
    wrong, named = sum(each.effective for each in cells), sum(each.named for each in cells)
    assert named >= NAMED_MIN * wrong
