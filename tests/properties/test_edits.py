"""Edits of right schedules: the court passes what is right, and sees what it was made to see."""

from itertools import islice

import numpy as np
import pytest
from edits import OPERATORS, drawn
from edits.columns import Case, cases, strategies
from edits.court import Kind
from edits.table import AIMED, Cell, aimed_cells, drawn_cells, lines

COLUMNS = list(strategies())
SORTS = [
    name
    for name in COLUMNS
    if name.endswith(("pipelines", "float8"))
    or not any(name.startswith((f"{other} ", f"{other},")) for other in COLUMNS)
]
"""Columns without those of one more option of a runtime, which the long test has."""
FOUND_MIN = 0.995
"""Of edits that are wrong, the share that a proof refuses at least."""
FEW = (
    "stage 2",
    "stage 3",
    "deepspeed 3",
    "megatron overlapped",
    "pipelines",
    "dropout",
    "frozen, stage 3",
    "frozen, fsdp2",
)
PLACES, PLACES_OF_EACH = 12, 2
"""Places where a kind of fault is tried at most: in all schedules, and in each."""
HARMLESS = {
    "padding or accumulator not zeroed": "padding that a collective carries and nobody reads",
    "good steps counted on overflow": "they are forgotten at once",
    "skipped steps are not counted": "nothing reads them",
    "flag a sum": "a sum of flags is zero where all are",
    "reduction is not waited for": "something else waits",
}
"""Kinds of edits of which none has to be wrong, and why."""


def judged_right(case: Case) -> None:
    verdict = case.court.judge(case.schedule, np.random.default_rng(0))
    assert verdict.kind is Kind.HARMLESS, verdict


@pytest.mark.matrix(5)
@pytest.mark.parametrize("column", SORTS)
def test_the_court_passes_what_is_right(column: str) -> None:
    judged_right(next(iter(cases(column))))


@pytest.mark.long
@pytest.mark.parametrize("column", COLUMNS)
def test_the_court_passes_all_that_is_right(column: str) -> None:
    for case in cases(column):
        judged_right(case)


@pytest.fixture(scope="module")
def some() -> list[Case]:
    return [case for column in FEW for case in cases(column)]


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", AIMED)
def test_the_court_sees_every_named_kind_of_fault(name: str, some: list[Case]) -> None:
    """In the first schedules that can express it, in one of the first places."""
    rng = np.random.default_rng(0)
    found = (
        (case, edit) for case in some for edit in islice(AIMED[name](case.schedule), PLACES_OF_EACH)
    )
    if name in HARMLESS:
        assert list(islice(found, 1))
    else:
        judged = islice(found, PLACES)
        assert any(case.court.judge(edit.schedule, rng).is_wrong for case, edit in judged)


@pytest.mark.matrix(5)
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_makes_schedules_that_differ(name: str, some: list[Case]) -> None:
    among = some[::3]
    made = [drawn(OPERATORS[name], case.schedule, np.random.default_rng(1)) for case in among]
    again = [drawn(OPERATORS[name], case.schedule, np.random.default_rng(1)) for case in among]
    assert made == again
    assert sum(each is not None for each in made) > len(made) // 3
    for case, edit in zip(among, made, strict=True):
        assert edit is None or edit.schedule != case.schedule


def missed(cells: list[Cell]) -> list[str]:
    return [f"{each.kind}: {text}" for each in cells for text in (*each.missed, *each.raised)]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("column", ["stage 3", "pipelines"])
def test_a_few_edits_that_are_wrong_are_refused(column: str) -> None:
    among = list(cases(column))[:1]
    cells = list(drawn_cells(column, among, OPERATORS, count=1, seed=3))
    assert sum(each.effective for each in cells) > len(cells) // 2
    assert not missed(cells)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("column", COLUMNS)
def test_edits_that_are_wrong_are_refused(column: str) -> None:
    among = list(cases(column))
    cells = [
        *drawn_cells(column, among, OPERATORS, count=30, seed=0),
        *aimed_cells(column, among, AIMED, sites=5, seed=0),
    ]
    print(f"\n{column}", *lines(cells), sep="\n")  # noqa: T201 (the table is what this run is for)
    wrong, caught = sum(each.effective for each in cells), sum(each.caught for each in cells)
    assert wrong > sum(each.drawn for each in cells) // 2
    assert caught >= FOUND_MIN * wrong, missed(cells)
