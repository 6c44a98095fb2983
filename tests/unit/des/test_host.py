"""What hosts spend to issue operations, and what waits for them; worked out on paper."""

from dataclasses import replace
from typing import Any

import pytest
from drawn_clusters import NO_MODEL

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.profile.host_launch import (
    NAMES,
    LaunchCosts,
    LaunchError,
    launch_costs,
    seconds_of,
)
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import Action, FreeMode, Operation, Role
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import RankTrace, Trace
from zsim_des import SimBackend
from zsim_des.engine.instruction import Enqueue

LAUNCH = LaunchCosts(
    forward_ps=100, backward_ps=200, operation_ps=30, collective_ps=1000, wait_ps=7
)
GPU = Gpu(name="round", memory_bytes=10**6, memory_bytes_per_s=10**12, rates=(), launch=LAUNCH)
CLUSTER = Cluster(
    name="round",
    nodes=1,
    gpus_per_node=4,
    gpu=GPU,
    switch_link=Link(bytes_per_s=10**11),
    nics_per_node=2,
    nic_link=Link(bytes_per_s=10**10),
)
SMALL = Kernel(kind=KernelKind.NORM, flops=0, bytes=1, dtype=DType.FP32)


class Listener:
    """Hears everything and says nothing: a run that is watched."""

    def act(self, rank: int, step: int, operation: Operation, host_ps: int) -> None:
        """Nothing."""

    def put(self, rank: int, step: int, entry: Enqueue, host_ps: int) -> None:
        """Nothing."""

    def end(self, rank: int, step: int, slot: int, span_ps: tuple[int, int]) -> None:
        """Nothing."""


def run(schedule: Schedule, *, steps: int = 1, watched: bool = False) -> Trace:
    job = Job(schedule=schedule, model=NO_MODEL, cluster=CLUSTER, steps=steps)
    return SimBackend(watcher=Listener() if watched else None).run(job, seed=0)


def rank(schedule: Schedule, *, steps: int = 1) -> RankTrace:
    """The one rank; watched or not, it does the same."""
    trace = run(schedule, steps=steps)
    assert replace(run(schedule, steps=steps, watched=True), error_text=trace.error_text) == trace
    (found,) = trace.ranks
    return found


def starts(found: RankTrace) -> dict[str, int]:
    return {event.operation.removeprefix("step/"): event.start_ps for event in found.events}


def test_each_kind_of_operation_has_its_cost() -> None:
    build = ScheduleBuilder.of("kinds", data=2)
    group = build.group("data", "data")
    x, y = build.buffer("x", 1), build.buffer("y", 1)
    step = build.step
    step.allocate(x, y)
    step.compute("forward", Action.FORWARD, [(Role.OUTPUT, x.all)], kernels=(SMALL, SMALL))
    step.compute("backward", Action.BACKWARD, [(Role.INPUT_GRADIENT, x.all)], kernels=(SMALL,))
    step.compute("load", Action.LOAD, [(Role.OUTPUT, x.all)])
    step.fill("fill", y.all, 0.0)
    reduced = step.all_reduce("reduce", group, x.all, after=["step/load"])
    step.copy("copy", x.all, y.all, after=[reduced])
    # 2 x 100; + 200; + 30; + 30; + 1000 and an event; then the copy is issued after 30 and an
    # event, before x is reduced: an element of 4 bytes to and fro at 10 ps each.
    found = starts(rank(build.schedule()))
    assert [found[name] for name in ("forward", "backward", "load", "fill", "reduce")] == [
        200,
        400,
        430,
        460,
        1467,
    ]
    assert found["copy"] == 1467 + max(37, 80)


def test_a_stream_waits_for_a_busy_host_and_that_is_told_by_step() -> None:
    build = ScheduleBuilder.of("bound", data=1)
    x = build.buffer("x", 1)
    build.step.allocate(x)
    for index in range(3):
        build.step.compute(f"k{index}", Action.FORWARD, [(Role.OUTPUT, x.all)], kernels=(SMALL,))
    build.step.free(x)
    found = rank(build.schedule(), steps=2)
    # A kernel takes 1 ps and its launch 100: all but the ends of three kernels is waiting. The
    # second step's first wait begins when the last kernel of the first has ended.
    assert found.host_bound_ps == (100 + 99 + 99, 99 + 99 + 99)


def test_what_waits_for_others_or_for_a_host_that_waits_is_not_bound_by_the_host() -> None:
    build = ScheduleBuilder.of("waits", data=2)
    group = build.group("data", "data")
    x, y = build.buffer("x", 1000), build.buffer("y", 1)
    step = build.step
    step.allocate(x, y)
    reduced = step.all_reduce("reduce", group, x.all)  # issued at 1000, takes 4000 bytes x 10 ps
    step.compute("after", Action.FORWARD, [(Role.OUTPUT, x.all)], kernels=(SMALL,), after=[reduced])
    step.host_wait("wait", reduced)
    step.compute("next", Action.FORWARD, [(Role.OUTPUT, y.all)], kernels=(SMALL,))
    found = rank(build.schedule())
    end = 1000 + 40_000
    # "after" is issued long before x is reduced. Then the host, which has waited until that, spends
    # 100 ps on "next", in the first of which the stream still has work.
    assert starts(found) == {"reduce": 1000, "after": end, "next": end + 100}
    assert found.host_bound_ps == (99,)


def test_frees_and_branches_cost_the_host_events() -> None:
    build = ScheduleBuilder.of("frees", data=1)
    x, y = build.buffer("x", 1), build.buffer("y", 1)
    step = build.step
    for mode in (FreeMode.WAITED, FreeMode.HOST, FreeMode.DEFERRED):
        step.allocate(x)
        filled = step.fill(f"fill {mode}", x.all, 0.0, stream="communication")
        step.free(x, uses=[filled], mode=mode)
    step.allocate(y)
    step.fill("last", y.all, 0.0)
    # A fill takes 4 ps. Fills are issued at 30, at 30 + 7 + 30, and after a wait of the host for
    # that one, which has ended when it has recorded its event, at 67 + 7 + 30; the deferred free
    # costs nothing before the last one.
    assert list(starts(rank(build.schedule())).values()) == [30, 67, 104, 134]


def test_a_host_that_is_free_of_charge_is_never_waited_for() -> None:
    build = ScheduleBuilder.of("free", data=1)
    x = build.buffer("x", 1)
    build.step.allocate(x)
    first = build.step.fill("first", x.all, 0.0)
    build.step.host_wait("wait", first)
    build.step.fill("second", x.all, 0.0)
    free = replace(CLUSTER, gpu=replace(GPU, launch=LaunchCosts()))
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=free)
    assert [each.host_bound_ps for each in SimBackend().run(job, seed=0).ranks] == [()]


@pytest.mark.parametrize(
    ("launch_ps", "bound"), [(10, "compute"), (5000, "the host"), (0, "compute")]
)
def test_a_summary_names_the_host_where_it_takes_most(launch_ps: int, bound: str) -> None:
    build = ScheduleBuilder.of("summary", data=1)
    x = build.buffer("x", 100)
    build.step.allocate(x)
    for index in range(5):
        build.step.compute(f"k{index}", Action.FORWARD, [(Role.OUTPUT, x.all)])
    build.step.free(x)
    launch = LaunchCosts(forward_ps=launch_ps)
    cluster = replace(CLUSTER, gpu=replace(GPU, launch=launch))
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster, steps=2)
    found = summary(job, SimBackend().run(job, seed=0))
    assert found.bound_by == bound
    # Each of the five takes 400 ps, and what its launch takes longer is waited for.
    assert found.host_bound_s == 5 * max(0, launch_ps - 400) / 1e12


def test_costs_are_told_in_seconds_and_no_others_are_taken() -> None:
    assert launch_costs(seconds_of(LAUNCH)) == LAUNCH
    assert launch_costs({}) == LaunchCosts()
    with pytest.raises(LaunchError, match="kernel_s: must be one of forward_s, backward_s"):
        launch_costs({"kernel_s": 1.0})
    for name in NAMES:
        given: dict[str, Any] = {name: -1}
        with pytest.raises(LaunchError, match=f"{name}: -1 must be at least 0"):
            replace(LaunchCosts(), **given)
