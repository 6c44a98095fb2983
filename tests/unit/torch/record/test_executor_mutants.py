"""Changes of the executor's own code: the judges find them, whatever is changed."""

from collections import Counter
from collections.abc import Iterator

import pytest
from faults.judge import Outcome, judge
from faults.of_executor.patches import (
    ALONE,
    CROSSED,
    FLYING,
    MOVED,
    PINNED,
    STAGES,
    Plant,
    plant_of,
)
from faults.of_executor.rank_runs import RUNS as RUNS_OF_RANKS
from faults.of_executor.rank_runs import RankRun, Ranks
from faults.of_executor.registry import CHANGES, PLANTS, ExecutorFault
from faults.of_executor.runs import LocalRun

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

TEXTS = [each for each in PLANTS.values() if each.unchanged is not None]
"""Changes of texts."""
RUNS = dict.fromkeys(each.run for each in TEXTS)
SHORT = (CROSSED, PINNED, FLYING, STAGES, ALONE, MOVED)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


def job_of(run: str, ranks: Ranks) -> LocalRun | RankRun:
    return RankRun(run, ranks) if run == FLYING or run in RUNS_OF_RANKS else LocalRun(run)


def test_there_are_enough_changes_and_few_that_no_judge_can_see() -> None:
    same = Counter(each.group for each in CHANGES if each.harmless)
    counts = Counter(each.group for each in CHANGES)
    assert sum(counts.values()) - sum(same.values()) >= 40
    assert all(same[group] <= 0.1 * count for group, count in counts.items())


@pytest.mark.parametrize("plant", TEXTS, ids=lambda each: each.id)
def test_a_change_still_applies(plant: Plant) -> None:
    with plant.inside() as reached:
        pass
    assert not reached.count


@pytest.mark.parametrize(
    "run",
    [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in RUNS],
)
def test_the_executor_itself_is_right(run: str, ranks: Ranks) -> None:
    """Also where the functions that are changed in this run are compiled anew."""
    changed = {(each.owner, each.function): each for each in TEXTS if each.run == run}
    assert job_of(run, ranks).planted([*changed.values()], unchanged=True) == {}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", CHANGES, ids=str)
def test_a_change_is_found(fault: ExecutorFault, ranks: Ranks) -> None:
    job = job_of(PLANTS[fault.id].run, ranks)
    (mutant,) = fault.mutants(job.subject)
    verdict = judge(fault, mutant, job)
    assert not verdict.fails
    assert verdict.outcome is (Outcome.HARMLESS if fault.harmless else Outcome.FOUND), verdict
    assert verdict.is_named or not mutant.where


class _Untouched:
    """A class that no run uses."""

    def unused(self) -> int:
        """Return a number."""
        number = 1
        if number:
            number += 1
        return number


def test_a_change_that_no_run_comes_to_is_refused() -> None:
    lines = ["untouched | by hand", "- number += 1", "+ number += 2"]
    plant = plant_of(_Untouched, "unused", lines)
    with pytest.raises(AssertionError, match="no operation comes to what is changed"):
        LocalRun(CROSSED).planted([plant])
    with plant.inside() as reached:
        assert _Untouched().unused() == 3
    assert reached.count == 1
    assert _Untouched().unused() == 2
