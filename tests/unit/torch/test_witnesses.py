"""What the executor is seen to do is what its schedule says, and no planted fault passes."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from faults.judge import Outcome, judge
from faults.of_executor.patches import WITNESSED
from faults.of_executor.rank_runs import RankRun, Ranks, witnessed
from faults.of_executor.registry import PLANTS, WITNESSED_FAULTS, ExecutorFault
from faults.of_executor.witnessed_jobs import CALLS, FOUR, ON_HOST, STRATEGIES, job

from zsim.backend.document import decode_trace, encode_trace
from zsim.proof import against_trace as refinement
from zsim.schedule.replace import replace
from zsim.trace.kineto import kineto
from zsim.trace.trace import Trace
from zsim.trace.witness import Call, Witness


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


@pytest.fixture(scope="module")
def right(ranks: Ranks) -> Callable[[str], Trace]:
    """Return what is seen of a job without a fault, which runs once."""
    return cache(lambda name: witnessed(name, ranks))


@pytest.mark.matrix(8)
@pytest.mark.parametrize("name", [CALLS, FOUR, *STRATEGIES, *ON_HOST])
def test_a_run_without_a_fault_has_no_finding(right: Callable[[str], Trace], name: str) -> None:
    trace = right(name)
    assert refinement.examine(job(name).schedule, trace) == []


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", WITNESSED_FAULTS, ids=str)
def test_a_planted_fault_is_found_by_witnesses_alone(fault: ExecutorFault, ranks: Ranks) -> None:
    run = RankRun(PLANTS[fault.id].run, ranks)
    assert run.label.startswith(WITNESSED)
    (mutant,) = fault.mutants(run.subject)
    verdict = judge(fault, mutant, run)
    assert verdict.outcome is Outcome.FOUND
    assert verdict.is_named or not mutant.where


@pytest.mark.one_commit_in(3)
def test_clocks_of_real_ranks_may_have_begun_at_any_moments(right: Callable[[str], Trace]) -> None:
    trace = right("stage 3")
    for by_ps in (-(10**15), 7, 10**15):
        late = tuple(
            replace(each, start_ps=each.start_ps + by_ps, end_ps=each.end_ps + by_ps)
            for each in trace.ranks[1].events
        )
        ranks = (trace.ranks[0], replace(trace.ranks[1], events=late))
        ends = tuple(max(end, end + by_ps) for end in trace.step_end_ps)
        shifted = replace(trace, ranks=ranks, step_end_ps=ends)
        assert refinement.examine(job("stage 3").schedule, shifted) == []


def test_a_trace_keeps_its_witnesses_in_a_file(right: Callable[[str], Trace]) -> None:
    trace = right(CALLS)
    assert all(one.witness is not None for one in trace.ranks)
    profile = kineto(job(CALLS).schedule, trace, trace.ranks[0])
    assert decode_trace(encode_trace(trace, profile)) == trace


def test_what_has_no_witness_is_not_shown(right: Callable[[str], Trace]) -> None:
    trace = right(CALLS)
    first, second = trace.ranks
    assert refinement.proved_properties(trace, []) == (("run (2 ranks, by witnesses)",), ())
    half = replace(trace, ranks=(first, replace(second, witness=None)))
    proved, (line,) = refinement.proved_properties(half, [])
    assert proved == ("run (2 ranks, as it says itself)",)
    assert line == "what the run did beyond its own word: no witnesses in the trace of rank 1"
    assert refinement.examine(job(CALLS).schedule, half) == []


def test_a_witness_of_other_operations_is_told_where_it_departs(
    right: Callable[[str], Trace],
) -> None:
    trace = right(CALLS)
    first, second = trace.ranks
    assert first.witness is not None
    marks = (first.witness.marks[0], *first.witness.marks[2:])
    cut = replace(first, witness=replace(first.witness, marks=marks))
    found = refinement.examine(job(CALLS).schedule, replace(trace, ranks=(cut, second)))
    assert [(each.operation, each.why, each.witness) for each in found] == [
        (
            "setup/zero",
            "the host came to something else",
            ("the schedule has setup/zero", "the host came to the end"),
        )
    ]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("by_thread", [True, False])
@pytest.mark.parametrize("marks_late", [-1, 1, 10**6])
def test_a_thread_of_torch_distributed_may_drop_memory_late_and_nobody_else(
    right: Callable[[str], Trace], by_thread: bool, marks_late: int
) -> None:
    trace = right("stage 3")
    first, second = trace.ranks
    assert first.witness is not None
    marks = [mark.tick for mark in first.witness.marks]
    found = refinement.examine(job("stage 3").schedule, trace)
    assert found == []
    gathered = {one.target[0] for one in first.witness.collectives if one.target is not None}
    number, when = next(
        (number, storage.released)
        for number, storage in enumerate(first.witness.storages)
        if number in gathered and storage.released is not None
    )
    at = sum(tick <= when for tick in marks) - 1
    shifted = marks[at + marks_late] if at + marks_late < len(marks) else None
    storages = list(first.witness.storages)
    storages[number] = replace(storages[number], released=shifted, by_thread=by_thread)
    told = replace(first, witness=replace(first.witness, storages=tuple(storages)))
    found = refinement.examine(job("stage 3").schedule, replace(trace, ranks=(told, second)))
    assert bool(found) is not (by_thread and marks_late == 1)


def test_regions_of_no_storage_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"region \[2, 0, 4\] is of no storage"):
        Witness(
            marks=(),
            storages=(),
            calls=(Call(operator="aten::add_", tick=1, writes=((2, 0, 4),)),),
            collectives=(),
        )
