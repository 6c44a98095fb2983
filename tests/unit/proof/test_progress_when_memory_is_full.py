"""Progress of ranks whose allocator may give its cache back, for which the host waits."""

from collections.abc import Callable

import pytest
from drawn_clusters import NO_MODEL
from drawn_emulated import emulated_jobs, pipelined_jobs
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.backend.backend import Job, RunFailedError
from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.dtype import DType
from zsim.memory import MemoryWait, RankMemory
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import BufferHandle, RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import FreeMode
from zsim.schedule.schedule import Discipline, Pool, Schedule
from zsim.strategy.strategy import Strategy
from zsim_des import SimBackend
from zsim_des.engine.worst_case import WorstCases

MIB = 2**20
ORDER = ("matching", "progress", "order across communicators")
Allocating = Callable[..., MemoryWait | None]


def crossing(*, in_order: bool) -> Schedule:
    """Two roles that all-reduce twice, on two streams; one allocates in between.

    Each rank frees memory before, which its allocator keeps, too little for what is allocated.
    """
    build = ScheduleBuilder.of("crossing", data=2)
    build.pools = [Pool(name="device", discipline=Discipline.CACHING)]
    build.stream("other")
    groups = {name: build.group(name, "data") for name in ("x", "y")}
    for role, start, order in (("one", 0, "xy"), ("two", 1, "xy" if in_order else "yx")):
        part = build.role(role, Span(axis="data", start=start, end=start + 1))
        small, large = part.buffer("small", 8 * MIB), part.buffer("large", 10 * MIB)
        buffers = {name: part.buffer(name, MIB) for name in "xy"}
        part.step.allocate(small, *buffers.values())
        part.step.fill("small", small.all, 0.0)
        for buffer in buffers.values():
            part.step.fill(f"{buffer.name}/fill", buffer.all, 0.0)
        part.step.free(small)
        first, second = order[0], order[1]
        _sum(part, first, groups, buffers)
        part.step.allocate(large)
        part.step.fill("large", large.all, 0.0)
        _sum(part, second, groups, buffers)
        part.step.free(large)
        for name, buffer in buffers.items():
            part.step.free(buffer, mode=FreeMode.WAITED, uses=[f"step/{name}"])
    return build.schedule()


def _sum(
    part: RoleBuilder, name: str, groups: dict[str, str], buffers: dict[str, BufferHandle]
) -> None:
    stream = "other" if name == "x" else "communication"
    after = [f"step/{name}/fill"]
    part.step.all_reduce(name, groups[name], buffers[name].all, stream=stream, after=after)


def run(schedule: Schedule, memory_bytes: int, model: Model = NO_MODEL) -> bool:
    """Simulate one step; return whether every rank had the memory that it needs."""
    cluster = Cluster(
        name="one node",
        nodes=1,
        gpus_per_node=64,
        gpu=Gpu(
            name="any",
            memory_bytes=memory_bytes,
            memory_bytes_per_s=10**12,
            rates=tuple(Rate(dtype=d, peak=1, matmul=1, elementwise=1) for d in DType),
        ),
        switch_link=Link(bytes_per_s=10**11),
        nics_per_node=64,
        nic_link=Link(bytes_per_s=10**11),
    )
    job = Job(schedule=schedule, model=model, cluster=cluster)
    return SimBackend().run(job, seed=0).out_of_memory is None


def test_ranks_that_communicate_in_other_orders_hang_where_memory_is_full() -> None:
    schedule = crossing(in_order=False)
    assert {each.invariant for each in check(schedule)} == {"order across communicators"}
    assert run(schedule, 200 * MIB)
    with pytest.raises(RunFailedError, match="host at step/large/allocate"):
        run(schedule, 70 * MIB)


def test_ranks_that_communicate_in_one_order_go_on_where_memory_is_full() -> None:
    schedule = crossing(in_order=True)
    assert check(schedule) == ()
    assert run(schedule, 70 * MIB)


@pytest.mark.one_commit_in(9)
@given(st.one_of(emulated_jobs(), pipelined_jobs()))
@settings(max_examples=25)
def test_what_is_proved_goes_on_if_every_allocation_waits_for_the_device(
    drawn: tuple[Model, Strategy],
) -> None:
    model, strategy = drawn
    schedule = make_schedule(model, strategy)
    findings = check(schedule, model, compares=False)
    assert not [each for each in findings if each.invariant in ORDER]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorstCases, "may_wait", lambda *_: True)
        patch.setattr(RankMemory, "allocate", waiting_for_all(RankMemory.allocate))
        assert run(schedule, 2**50, model)


def waiting_for_all(allocate: Allocating) -> Allocating:
    """Return `allocate` with a wait for all streams, as if the cache were given back each time."""

    def allocating(*asked: object) -> MemoryWait:
        allocate(*asked)
        return MemoryWait((), None)

    return allocating
