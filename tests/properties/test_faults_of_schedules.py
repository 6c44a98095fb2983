"""Faults planted in right schedules: runs with values see them, and proofs find them."""

from itertools import islice

import numpy as np
import pytest
from faults.cases import Case, cases, strategies
from faults.changes import Edit
from faults.fault import drawn, first
from faults.ground_truth import Kind
from faults.happens_before import Graph
from faults.judge import judge, lines
from faults.of_schedules.drawn_edits import DRAWN
from faults.of_schedules.registry import JUDGED, ScheduleFault
from faults.table import cells

from zsim.model.model import Model
from zsim.proof import check
from zsim.proof.families import families
from zsim.strategy.strategy import Strategy

Drawn = tuple[Model, Strategy]
COLUMNS = list(strategies())
SORTS = [
    name
    for name in COLUMNS
    if name.endswith(("pipelines", "float8"))
    or not any(name.startswith((f"{other} ", f"{other},")) for other in COLUMNS)
]
"""Columns without those of one more option of a runtime, which the long test has."""
FEW = (
    "stage 2",
    "stage 3",
    "deepspeed 3",
    "megatron overlapped",
    "pipelines",
    "dropout",
    "frozen, stage 3",
    "frozen, fsdp2",
    "stage 0",
    "stage 1",
)
"""Columns in which each fault of the table is planted."""
OF_EACH, AT_MOST = 2, 48
"""Mutants of a fault that are judged: of each schedule, and of all."""
WANTED = {"places": (30, 300), "drawn": (30, 30)}
"""Wrong mutants of each fault of a group that are wanted in the long test, and tries."""
FOUND_MIN, NAMED_MIN = 0.995, 0.98
"""Of wrong mutants the share that is found, and, at a place, the share that is found there."""


def judged_right(case: Case) -> None:
    truth = case.truth(case.subject, np.random.default_rng(0))
    assert truth.kind is Kind.HARMLESS, truth
    for overflow_steps in case.ground_truth.overflows:
        assert list(Graph(case.subject, overflow_steps).races()) == []


@pytest.mark.matrix(8)
@pytest.mark.parametrize("column", SORTS)
def test_the_court_passes_what_is_right(column: str) -> None:
    judged_right(next(iter(cases(column))))


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
def test_the_court_passes_all_that_is_right(column: str) -> None:
    for case in cases(column):
        judged_right(case)
        assert check(case.subject, case.model) == ()


@pytest.fixture(scope="module")
def some() -> list[Case]:
    return [case for column in FEW for case in cases(column)]


def test_families_that_have_to_find_a_fault_exist() -> None:
    assert {family for fault in JUDGED for family in fault.found_by} <= set(families())


def few(fault: ScheduleFault, case: Case, seed: int) -> list[Edit]:
    """Return the first mutants, or any of those that are made when they are asked for."""
    found = fault.mutants(case.subject, seed)
    if fault.group == "places":
        listed = list(found)
        order = np.random.default_rng(0).permutation(len(listed))
        found = (listed[place] for place in order.tolist())
    return first(found, OF_EACH)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", JUDGED, ids=str)
def test_a_fault_is_seen_by_runs_and_found_by_its_families(
    fault: ScheduleFault, some: list[Case]
) -> None:
    """In the first schedules where it applies, until a wrong mutant and its family are seen."""
    able = ((case, each) for seed, case in enumerate(some) for each in few(fault, case, seed))
    wrong, found = False, set[str]()
    for case, mutant in islice(able, AT_MOST):
        verdict = judge(fault, mutant, case, always=True)
        assert not verdict.fails, (case.label, case.strategy)
        wrong |= bool(verdict.is_wrong)
        found |= verdict.found
        if wrong and found & fault.found_by:
            break
    assert (wrong and found & fault.found_by) or fault.harmless, found


@pytest.mark.parametrize("fault", [each for each in JUDGED if each.harmless], ids=str)
def test_a_fault_that_may_be_harmless_can_be_planted(
    fault: ScheduleFault, some: list[Case]
) -> None:
    assert any(first(fault.mutants(case.subject), 1) for case in some)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_mutants_are_repeatable_and_differ(name: str, some: list[Case]) -> None:
    among = some[::3]
    made, again = (
        [drawn(DRAWN[name], case.subject, np.random.default_rng(1)) for case in among]
        for _ in range(2)
    )
    assert [each and (each.text, each.made) for each in made] == [
        each and (each.text, each.made) for each in again
    ]
    assert sum(each is not None for each in made) > len(made) // 3
    for case, mutant in zip(among, made, strict=True):
        assert mutant is None or mutant.made != case.subject


@pytest.mark.long
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("column", COLUMNS)
def test_faults_of_a_column_are_found(column: str) -> None:
    found = list(cells(column, WANTED, otherwise=(5, 5)))
    print(f"\n{column}", *lines(found), sep="\n")  # noqa: T201 (the table is what this run is for)
    wrong = [(cell, each) for cell in found for each in cell.wrong]
    caught = [each for _, each in wrong if each.found]
    assert len(caught) >= FOUND_MIN * len(wrong), [each.fails for _, each in wrong if each.fails]
    for cell in found:
        if cell.group == "places":
            assert len(cell.wrong) == WANTED[cell.group][0] or len(cell.verdicts) == cell.sites
    drawn = [each for cell in found if cell.group == "drawn" for each in cell.verdicts]
    assert sum(each.is_wrong is True for each in drawn) > len(drawn) // 2
    at_places = [each for cell, each in wrong if cell.group == "places"]
    assert all(each.found for each in at_places)
    assert sum(each.is_named for each in at_places) >= NAMED_MIN * len(at_places)
