"""Changes of the executor's own code: the judges find them, whatever is changed."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from court_of_ranks import RUNS as RUNS_OF_RANKS
from court_of_ranks import CourtOfRanks
from executor_court import bytes_of, verdict
from executor_mutant import ALONE, CROSSED, FLYING, MOVED, PINNED, STAGES, Mutant
from executor_mutants import BY_KIND, BY_NAME, MUTANTS

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

JUDGED = [each for each in MUTANTS if not each.same]
MISSED: dict[str, str] = {}
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
    "flights touch nothing",
    "a leaf of autograd adds its gradients up",
    "messages go through the default group",
    "a prepared update keeps the rate of its first step",
    "a prepared update outlives its memory",
}
"""Mutants of the suite; the others are under `long`."""

RUNS = dict.fromkeys(each.hint for each in MUTANTS)
SHORT = (CROSSED, PINNED, FLYING, STAGES, ALONE, MOVED)


@pytest.fixture(scope="module")
def ranks() -> Iterator[CourtOfRanks]:
    with CourtOfRanks() as court:
        yield court


def found_in(run: str, mutants: list[Mutant], court: CourtOfRanks, *, unchanged: bool) -> str:
    """Return what is wrong with mutants planted, all of whose changes have to be come to."""
    if run == FLYING or run in RUNS_OF_RANKS:
        found, reached = court.verdict(run, *[each.name for each in mutants], unchanged=unchanged)
    else:
        most = bytes_of(run)
        with ExitStack() as stack:
            planted = [
                (each.name, stack.enter_context(each.planted(unchanged=unchanged)))
                for each in mutants
            ]
            found = verdict(run, most)
        reached = {name for name, count in planted if count.count}
    assert reached == {each.name for each in mutants}, "no operation comes to what is changed"
    return found


def test_there_are_enough_mutants_and_few_are_missed() -> None:
    assert len(BY_NAME) == len(MUTANTS)
    assert set(BY_NAME) >= DRAWN | set(MISSED)
    assert len(JUDGED) >= 40
    assert len(MISSED) <= 0.05 * len(JUDGED)
    for kind in BY_KIND.values():
        judged = [each for each in kind if not each.same]
        assert sum(each.name in MISSED for each in judged) <= 0.1 * len(judged)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    with mutant.planted() as reached:
        pass
    assert not reached.count


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "run",
    [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in RUNS],
)
def test_the_executor_itself_is_right(run: str, ranks: CourtOfRanks) -> None:
    """Also where the functions that mutants of this run change are compiled anew."""
    changed = {(each.owner, each.function): each for each in MUTANTS if each.hint == run}
    assert found_in(run, [*changed.values()], ranks, unchanged=True) == ""


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=() if each.name in DRAWN else pytest.mark.long)
        for each in MUTANTS
    ],
)
def test_a_mutant_is_found(mutant: Mutant, ranks: CourtOfRanks) -> None:
    found = found_in(mutant.hint, [mutant], ranks, unchanged=False)
    print(f"{mutant.name}: {found or mutant.same or MISSED.get(mutant.name, 'missed')}")  # noqa: T201
    assert bool(found) == (not mutant.same and mutant.name not in MISSED)


class _Untouched:
    """A class that no run uses."""

    def unused(self) -> int:
        """Return a number."""
        number = 1
        if number:
            number += 1
        return number


def test_a_mutant_that_no_run_comes_to_is_refused(ranks: CourtOfRanks) -> None:
    mutant = Mutant("untouched", CROSSED, _Untouched, "unused", "number += 1", "number += 2")
    with pytest.raises(AssertionError, match="no operation comes to what is changed"):
        found_in(CROSSED, [mutant], ranks, unchanged=False)
    with mutant.planted() as reached:
        assert _Untouched().unused() == 3
    assert reached.count == 1
    assert _Untouched().unused() == 2
