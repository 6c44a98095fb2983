"""Changes of the executor's own code: the judges find them, whatever is changed."""

import pytest
from executor_court import verdict
from executor_mutant import CROSSED, PINNED, Mutant
from mutants_of_memory import MUTANTS_OF_MEMORY
from mutants_of_waits import MUTANTS_OF_WAITS

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

MUTANTS = (*MUTANTS_OF_WAITS, *MUTANTS_OF_MEMORY)
JUDGED = [each for each in MUTANTS if not each.same]
MISSED = {
    "a free of lent memory marks nothing": "recordings do not see threads of the host",
    "a thread does not wait for the device": "recordings do not see threads of the host",
    "a gradient that shares its memory is written in place": "no module here has such gradients",
}
"""Mutants that no judge finds, and why."""

DRAWN = {
    "an operation waits for its last edge alone",
    "steps before are not waited for",
    "deferred memory is back after its first use",
    "a free is thought to make the host wait",
    "a thread does not wait for threads",
    "host memory is lent while it is used",
    "numbers of the first step are kept",
    "gradients are not clipped",
}
"""Mutants of the suite; the others are under `long`."""


RUNS = dict.fromkeys(each.hint for each in MUTANTS)
BY_HAND = (CROSSED, PINNED)


def test_there_are_enough_mutants_and_few_are_missed() -> None:
    names = {each.name for each in MUTANTS}
    assert len(names) == len(MUTANTS)
    assert names >= DRAWN | set(MISSED)
    assert len(JUDGED) >= 40
    assert len(MISSED) <= 0.05 * len(JUDGED)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    with mutant.planted():
        pass


@pytest.mark.parametrize(
    "run",
    [pytest.param(each, marks=() if each in BY_HAND else pytest.mark.long) for each in RUNS],
)
def test_the_executor_itself_is_right(run: str) -> None:
    assert verdict(run) == ""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=() if each.name in DRAWN else pytest.mark.long)
        for each in MUTANTS
    ],
)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    with mutant.planted():
        found = verdict(mutant.hint)
    print(f"{mutant.name}: {found or mutant.same or MISSED.get(mutant.name, 'missed')}")  # noqa: T201
    assert bool(found) == (not mutant.same and mutant.name not in MISSED)
