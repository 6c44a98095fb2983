"""Changes of the executor's own code on real ranks: values and witnesses find them."""

from collections.abc import Iterator

import pytest
from faults.judge import Outcome, judge
from faults.of_executor.patches import FLYING, STAGES
from faults.of_executor.rank_runs import RankRun, Ranks, is_on_ranks
from faults.of_executor.registry import CHANGES, PLANTS, ExecutorFault

ON_RANKS = [each for each in CHANGES if is_on_ranks(PLANTS[each.id].run)]
RUNS = dict.fromkeys(PLANTS[each.id].run for each in ON_RANKS)
SHORT = (FLYING, STAGES)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "run",
    [pytest.param(each, marks=() if each in SHORT else pytest.mark.long) for each in RUNS],
)
def test_the_executor_itself_is_right(run: str, ranks: Ranks) -> None:
    """Also where the functions that are changed in this run are compiled anew."""
    plants = [PLANTS[each.id] for each in ON_RANKS if each.applies(run)]
    changed = {(each.owner, each.function): each for each in plants}
    assert RankRun(run, ranks).planted([*changed.values()], unchanged=True) == {}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", ON_RANKS, ids=str)
def test_a_change_is_found(fault: ExecutorFault, ranks: Ranks) -> None:
    job = RankRun(PLANTS[fault.id].run, ranks)
    (mutant,) = fault.mutants(job.subject)
    verdict = judge(fault, mutant, job)
    assert verdict.outcome is (Outcome.HARMLESS if fault.harmless else Outcome.FOUND), verdict
