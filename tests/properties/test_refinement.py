"""A trace is held to be a run of its schedule exactly if it can be one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from drawn import jobs
from drawn_clusters import NO_MODEL, clusters, harmless_schedules
from drawn_emulated import emulated_jobs
from hypothesis import given, settings
from hypothesis import strategies as st
from mutated_trace import MUTATIONS, Mutator

from zsim.backend import Job
from zsim.check import refinement
from zsim.runtimes.registry import make_schedule
from zsim.trace import Trace
from zsim_des import SimBackend

T = TypeVar("T")


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


@given(runs(), st.data())
@settings(deadline=None, max_examples=25)
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


@given(runs(), st.data())
@settings(deadline=None, max_examples=15)
def test_a_trace_that_no_run_leaves_is_found(run: tuple[Job, Trace], data: st.DataObject) -> None:
    job, trace = run

    def choose(among: Sequence[T]) -> T:
        return among[data.draw(st.integers(0, len(among) - 1))]

    for mutation in MUTATIONS:
        changed = mutation(Mutator(job.schedule, trace, choose))
        if changed is not None and changed != trace:
            assert refinement.examine(job.schedule, changed), mutation.__name__
