"""Changes of the executor's own code: judges in this process find them, whatever is changed."""

from collections import Counter

import pytest
from faults.judge import Outcome, judge
from faults.of_executor.patches import (
    ALONE,
    CROSSED,
    MOVED,
    PINNED,
    Plant,
    plant_of,
)
from faults.of_executor.rank_runs import is_on_ranks
from faults.of_executor.registry import CHANGES, PLANTS, ExecutorFault
from faults.of_executor.runs import LocalRun

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")

TEXTS = [each for each in PLANTS.values() if each.unchanged is not None]
"""Changes of texts."""
LOCAL = [each for each in CHANGES if not is_on_ranks(PLANTS[each.id].run)]
RUNS = dict.fromkeys(each.run for each in TEXTS if not is_on_ranks(each.run))
SHORT = (CROSSED, PINNED, ALONE, MOVED)


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


@pytest.mark.matrix(3)
@pytest.mark.parametrize(
    "run",
    [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in RUNS],
)
def test_the_executor_itself_is_right(run: str) -> None:
    """Also where the functions that are changed in this run are compiled anew."""
    changed = {(each.owner, each.function): each for each in TEXTS if each.run == run}
    assert LocalRun(run).planted([*changed.values()], unchanged=True) == {}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", LOCAL, ids=str)
def test_a_change_is_found(fault: ExecutorFault) -> None:
    job = LocalRun(PLANTS[fault.id].run)
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
