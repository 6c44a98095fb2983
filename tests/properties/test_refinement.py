"""A trace is held to be a run of its schedule exactly if it can be one."""

from itertools import accumulate, pairwise, permutations

import numpy as np
import pytest
from drawn import jobs
from drawn_clusters import NO_MODEL, clusters, harmless_schedules
from drawn_emulated import emulated_jobs
from drawn_examples import examples
from exact_training import cluster
from faults.fault import Fault
from faults.judge import judge
from faults.of_traces import FAULTS_OF_TRACES, Recorded
from hypothesis import given
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.proof import against_trace as refinement
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.replace import replace
from zsim.trace.trace import Trace
from zsim_des import SimBackend


@st.composite
def runs(draw: st.DrawFn) -> tuple[Job, Trace]:
    """A job and a run of it: folded or not, with steps that overflow, on any cluster."""
    kind = draw(st.integers(0, 2))
    if kind:
        model, strategy = draw(jobs() if kind == 1 else emulated_jobs())
        made = make_schedule(model, strategy)
    else:
        model, made = NO_MODEL, draw(harmless_schedules())
    cluster = draw(clusters(made.mesh.size))
    job = Job(schedule=made, model=model, cluster=cluster, steps=draw(st.integers(1, 2)))
    overflows = draw(st.sets(st.integers(0, 1), max_size=1))
    backend = SimBackend(unfold=draw(st.booleans()), overflow_steps=frozenset(overflows))
    return job, backend.run(job, seed=0)


@pytest.mark.one_commit_in(3)
@given(runs(), st.data())
@examples(25)
def test_a_run_is_one_whatever_clocks_its_ranks_have(
    run: tuple[Job, Trace], data: st.DataObject
) -> None:
    job, trace = run
    assert refinement.examine(job.schedule, trace) == []
    shifts = st.integers(-(10**12), 10**12)
    ranks = tuple(
        replace(
            rank,
            events=tuple(
                replace(each, start_ps=each.start_ps + by, end_ps=each.end_ps + by)
                for each in rank.events
            ),
        )
        for rank in trace.ranks
        for by in [data.draw(shifts)]
    )
    late = tuple(end + 10**12 for end in trace.step_end_ps)
    assert refinement.examine(job.schedule, replace(trace, ranks=ranks, step_end_ps=late)) == []


ROUNDS, LONGEST_PS = 2, 9
REACH = 2 * ROUNDS * LONGEST_PS
"""No clock has to be set further than a rank runs."""


@st.composite
def timings(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Of each of three ranks, by its own clock, when each of its operations ran: one by one."""
    found: list[list[tuple[int, int]]] = []
    for _ in range(3):
        lengths = draw(st.lists(st.integers(0, LONGEST_PS), min_size=4, max_size=4))
        ends = list(accumulate(lengths))
        found.append(list(pairwise([0, *ends])))
    return found


def some_clocks_explain(times: list[list[tuple[int, int]]]) -> bool:
    """Whether any of all shifts lets each rank have a sum only when all have filled, by trying."""
    shifts = np.arange(-REACH, REACH + 1)
    grid = np.zeros(1), shifts[:, None], shifts[None, :]
    good = np.ones((shifts.size, shifts.size), dtype=bool)
    for number in range(ROUNDS):
        for taker, giver in permutations(range(3), 2):
            filled = times[giver][2 * number][1] + grid[giver]
            good &= times[taker][2 * number + 1][1] + grid[taker] >= filled
    return bool(good.any())


@given(timings())
@examples(60)
def test_times_are_refused_exactly_if_no_clocks_explain_them(
    times: list[list[tuple[int, int]]],
) -> None:
    build = ScheduleBuilder.of("rounds", data=3)
    group, x = build.group("data", "data"), build.buffer("x", 4)
    build.step.allocate(x)
    before: list[str] = []
    for number in range(ROUNDS):
        filled = build.step.fill(f"fill{number}", x.all, 1.0, after=before)
        before = [build.step.all_reduce(f"sum{number}", group, x.all, after=[filled])]
    build.step.free(x, uses=before)
    made = build.schedule()
    trace = SimBackend(unfold=True).run(
        Job(schedule=made, model=NO_MODEL, cluster=cluster(3)), seed=0
    )
    ranks = tuple(
        replace(
            rank,
            events=tuple(
                replace(event, start_ps=start, end_ps=end)
                for event, (start, end) in zip(rank.events, own, strict=True)
            ),
        )
        for rank, own in zip(trace.ranks, times, strict=True)
    )
    found = refinement.examine(made, replace(trace, ranks=ranks, step_end_ps=(10**6,)))
    assert (found == []) is some_clocks_explain(times)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fault", FAULTS_OF_TRACES, ids=str)
@given(runs(), st.integers(0, 2**32 - 1))
@examples(8)
def test_a_trace_that_no_run_leaves_is_found(
    fault: Fault[Recorded, Trace], run: tuple[Job, Trace], seed: int
) -> None:
    job, trace = run
    recorded = Recorded(job.schedule, trace)
    for mutant in fault.mutants(recorded.subject, seed):
        assert not judge(fault, mutant, recorded).fails
