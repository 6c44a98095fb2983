"""Times that can be worked out on paper."""

from dataclasses import replace
from fractions import Fraction

import pytest
from drawn_clusters import NO_MODEL

from zsim.backend.backend import Job, RefusedError, RunFailedError
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.fault import SlowGpu
from zsim.cluster.profile.host_launch import LaunchCosts
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind, matmul, streaming
from zsim.schedule.builder import COMMUNICATION, COMPUTE, ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Action, FreeMode, Previous, Role
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim_des import SimBackend

# One byte per picosecond of memory, one per 10 ps on a GPU's link, one per 100 ps on a NIC.
GPU = Gpu(name="round", memory_bytes=10**6, memory_bytes_per_s=10**12, rates=())
CLUSTER = Cluster(
    name="round",
    nodes=1,
    gpus_per_node=4,
    gpu=GPU,
    switch_link=Link(bytes_per_s=10**11, latency_ps=7),
    nics_per_node=2,
    nic_link=Link(bytes_per_s=10**10, latency_ps=50),
)


def run(schedule: Schedule, cluster: Cluster = CLUSTER, *, steps: int = 1) -> Trace:
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster, steps=steps)
    return SimBackend().run(job, seed=0)


def times(trace: Trace, rank: int = 0) -> dict[str, tuple[int, int]]:
    (found,) = [each for each in trace.ranks if each.rank == rank]
    return {
        event.operation.removeprefix("step/"): (event.start_ps, event.end_ps)
        for event in found.events
        if event.step == trace.steps - 1
    }


def gather(nodes: int, gpus: int) -> tuple[Schedule, Cluster]:
    count = nodes * gpus
    build = ScheduleBuilder.of("gather", data=count)
    group = build.group("data", "data")
    shard, whole = build.buffer("shard", 25), build.buffer("whole", 25 * count)
    build.step.allocate(shard, whole)
    build.step.all_gather("gather", group, shard.all, whole.all)
    return build.schedule(), replace(CLUSTER, nodes=nodes, gpus_per_node=gpus)


def test_an_all_gather_on_one_switch_takes_its_share_of_the_bytes_and_its_steps() -> None:
    # n = 4 x 100 bytes: (N - 1) / N x n = 300 bytes at 10 ps each; 3 steps of 2 hops of 7 ps.
    assert times(run(*gather(1, 4)))["gather"] == (0, 300 * 10 + 3 * 14)


def test_an_all_gather_over_nodes_is_as_fast_as_their_nics() -> None:
    # 8 ranks on 2 nodes: 700 bytes leave each node through 2 NICs at 100 ps per byte each.
    # 5 of 6 edges inside at 14 ps, 2 outside at 2 x 7 + 2 x 50 ps.
    assert times(run(*gather(2, 4)))["gather"] == (0, 700 * 100 // 2 + 5 * 14 + 2 * 114)


def test_groups_across_nodes_share_the_nics_that_are_nearest() -> None:
    # Tensor = 4 is a node; 4 data groups of 2 ranks cross 2 NICs: two groups on each.
    build = ScheduleBuilder.of("strided", data=2, tensor=4)
    group = build.group("data", "data")
    shard, whole = build.buffer("shard", 25), build.buffer("whole", 50)
    build.step.allocate(shard, whole)
    build.step.all_gather("gather", group, shard.all, whole.all)
    # Each rank sends 100 bytes; a NIC carries 200 at 100 ps; one of two edges outside, 114 ps.
    trace = run(build.schedule(), replace(CLUSTER, nodes=2))
    assert times(trace)["gather"] == (0, 200 * 100 + 114)


def two_at_once(one: str, other: str) -> Trace:
    """All-reduces of 200 elements on two streams: on tensor pairs of a node, or on data pairs."""
    build = ScheduleBuilder.of("two", data=2, tensor=2)
    groups = {axis: build.group(axis, axis) for axis in ("data", "tensor")}
    second = build.group("second", "tensor")
    groups["second"] = second
    left, right = build.buffer("left", 200), build.buffer("right", 200)
    build.step.allocate(left, right)
    build.step.all_reduce("left", groups[one], left.all, stream=COMPUTE)
    build.step.all_reduce("right", groups[other], right.all, stream=COMMUNICATION)
    quiet = replace(CLUSTER, gpus_per_node=2, nodes=2, switch_link=Link(bytes_per_s=10**11))
    return run(build.schedule(), replace(quiet, nic_link=Link(bytes_per_s=10**10)))


def test_collectives_on_one_link_share_it() -> None:
    # Each rank sends 800 bytes for each (2 x 1/2 x 800): 8000 ps alone, 16000 ps together.
    trace = two_at_once("tensor", "second")
    assert times(trace) == {"left": (0, 16000), "right": (0, 16000)}


def test_a_collective_that_another_link_holds_back_leaves_the_rest_to_others() -> None:
    # The data pair gets 1 byte per 100 ps of its NIC, so 0.1 of the GPU's link; the tensor pair
    # has the 0.9 that remain: 800 bytes at 100/9 ps each, rounded up.
    trace = two_at_once("tensor", "data")
    assert times(trace) == {"left": (0, -(-80000 // 9)), "right": (0, 80000)}


def test_compute_overlaps_communication_and_edges_order_them() -> None:
    build = ScheduleBuilder.of("overlap", data=4)
    group = build.group("data", "data")
    x, y = build.buffer("x", 400), build.buffer("y", 1000)
    build.step.allocate(x, y)
    reduced = build.step.all_reduce("reduce", group, x.all)
    build.step.fill("meanwhile", y.all, 0.0)
    build.step.fill("then", x.all, 0.0, after=[reduced])
    # 2 x 3 x 100 elements x 4 bytes x 10 ps, and 2 x 3 steps of 14 ps.
    end_ps = 2400 * 10 + 6 * 14
    assert times(run(build.schedule())) == {
        "reduce": (0, end_ps),
        "meanwhile": (0, 4000),
        "then": (end_ps, end_ps + 1600),
    }


SHARED = replace(CLUSTER.gpu, collective_share=Fraction(1, 4))
"""A GPU of whose multiprocessors a collective takes a quarter."""
PRODUCT = replace(matmul(1, 1, 1, DType.FP32), flops=0, bytes=4000)
MOVING = replace(streaming(KernelKind.NORM, (1000,), DType.FP32, streams=1), flops=0)
"""Each takes 4,000 ps alone."""


def beside(kernel: Kernel, gpu: Gpu) -> dict[str, tuple[int, int]]:
    """Times of a `kernel` that begins with an all-reduce, and of another after it."""
    build = ScheduleBuilder.of("beside", data=4)
    group = build.group("data", "data")
    x, y, z = build.buffer("x", 25), build.buffer("y", 1000), build.buffer("z", 100)
    build.step.allocate(x, y, z)
    build.step.all_reduce("reduce", group, x.all)
    build.step.compute("meanwhile", Action.FORWARD, [(Role.OUTPUT, y.all)], kernels=(kernel,))
    build.step.fill("then", z.all, 0.0)
    return times(run(build.schedule(), replace(CLUSTER, gpu=gpu)))


REDUCE_PS = 6 * 7 * 4 * 10 + 6 * 14
"""2 x 3 chunks of 7 elements and 2 x 3 steps of 14 ps."""


def test_a_product_of_matrices_lacks_the_multiprocessors_of_a_collective() -> None:
    # Of the time of the collective three quarters count.
    done_ps = REDUCE_PS + 4000 - REDUCE_PS * 3 // 4
    assert beside(PRODUCT, SHARED) == {
        "reduce": (0, REDUCE_PS),
        "meanwhile": (0, done_ps),
        "then": (done_ps, done_ps + 400),
    }


def test_what_moves_memory_lacks_the_bytes_of_a_collective_while_they_move() -> None:
    # The collective moves 2.5 bytes of memory for each that it sends, at 0.1 bytes a picosecond:
    # of a memory of 1 byte a picosecond a quarter. Its first 84 ps are latency: then none moves.
    done_ps = REDUCE_PS + 4000 - (84 + (REDUCE_PS - 84) * 3 // 4)
    assert beside(MOVING, SHARED)["meanwhile"] == (0, done_ps)


def test_a_collective_that_waits_takes_multiprocessors_and_no_bytes() -> None:
    assert met_late(PRODUCT) == 5334
    assert met_late(MOVING) == 4000


def met_late(kernel: Kernel) -> int:
    """Picoseconds of a `kernel` beside an all-reduce to which the other rank comes much later."""
    build = ScheduleBuilder.of("late", data=2)
    group = build.group("data", "data")
    x, y, z = build.buffer("x", 100), build.buffer("y", 1000), build.buffer("z", 100)
    build.step.allocate(x, y, z)
    first = build.step.fill("first", z.all, 0.0)
    build.step.all_reduce("reduce", group, x.all, after=[first])
    build.step.compute("meanwhile", Action.FORWARD, [(Role.OUTPUT, y.all)], kernels=(kernel,))
    job = Job(
        schedule=build.schedule(), model=NO_MODEL, cluster=replace(CLUSTER, gpu=SHARED), steps=1
    )
    late = SimBackend(faults=[SlowGpu(rank=1, factor=Fraction(1000))])
    start_ps, end_ps = times(late.run(job, seed=0))["meanwhile"]
    return end_ps - start_ps


def test_kernels_of_two_streams_share_the_gpu() -> None:
    build = ScheduleBuilder.of("shared", data=1)
    other = build.stream("other")
    y, z = build.buffer("y", 1000), build.buffer("z", 100)
    build.step.allocate(y, z)
    build.step.fill("long", y.all, 0.0)
    build.step.fill("short", z.all, 0.0, stream=other)
    # 4,000 ps and 400 ps of work: half of each picosecond is the short one's until it ends.
    found = times(run(build.schedule(), replace(CLUSTER, gpu=SHARED)))
    assert found == {"long": (0, 4400), "short": (0, 800)}


def freed(mode: FreeMode) -> dict[str, tuple[int, int]]:
    """A buffer of the compute stream, used by a collective, is freed before more compute."""
    build = ScheduleBuilder.of("reuse", data=4)
    group = build.group("data", "data")
    x, y = build.buffer("x", 400, home=COMPUTE), build.buffer("y", 100, home=COMPUTE)
    build.step.allocate(x)
    reduced = build.step.all_reduce("reduce", group, x.all)
    build.step.free(x, mode=mode, uses=[reduced])
    build.step.allocate(y)
    build.step.fill("next", y.all, 0.0)
    return times(run(build.schedule()))


def test_a_waited_free_holds_its_home_stream_until_the_uses_ended() -> None:
    assert freed(FreeMode.WAITED)["next"][0] == 2400 * 10 + 6 * 14
    assert freed(FreeMode.HOST)["next"][0] == 2400 * 10 + 6 * 14
    assert freed(FreeMode.DEFERRED)["next"][0] == 0


def test_a_deferred_free_returns_memory_when_the_host_allocates_after_the_use() -> None:
    build = ScheduleBuilder.of("deferred", data=4)
    group = build.group("data", "data")
    x, y = build.buffer("x", 400), build.buffer("y", 100)
    build.step.allocate(x)
    reduced = build.step.all_reduce("reduce", group, x.all)
    build.step.free(x, mode=FreeMode.DEFERRED, uses=[reduced])
    build.step.allocate(y)
    build.step.host_wait("wait", reduced)
    build.step.free(y)
    build.step.allocate(y)
    build.step.free(y)
    (rank,) = run(build.schedule()).ranks
    # The host runs ahead to the first y while x is in use, and waits before the second.
    changes = [entry.change_bytes for entry in rank.book]
    assert changes == [1600, 400, -400, -1600, 400, -400]


def test_the_host_pays_for_launches() -> None:
    build = ScheduleBuilder.of("launch", data=1)
    x = build.buffer("x", 1)
    build.step.allocate(x)
    for index in range(3):
        build.step.compute(f"load{index}", Action.LOAD, [(Role.OUTPUT, x.all)])
    slow_host = replace(CLUSTER, gpu=replace(GPU, launch=LaunchCosts(operation_ps=100)))
    # Kernels take 4 ps; the third is issued after three launches.
    assert times(run(build.schedule(), slow_host))["load2"] == (300, 304)


def test_setup_ends_before_the_first_step_begins_and_previous_instances_order_steps() -> None:
    build = ScheduleBuilder.of("steps", data=1)
    x = build.buffer("x", 25, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("init", x.all, 0.0, stream=COMMUNICATION)
    build.step.fill("first", x.all, 0.0, after=[Previous("step/second")])
    build.step.fill("second", x.all, 0.0, stream=COMMUNICATION, after=["step/first"])
    trace = run(build.schedule(), steps=3)
    (rank,) = trace.ranks
    assert (rank.events[0].start_ps, rank.events[0].end_ps, rank.events[0].step) == (-100, 0, -1)
    assert trace.step_end_ps == (200, 400, 600)


def roles(first: list[str], second: list[str]) -> Schedule:
    """Two roles of one rank that each all-reduce x and y on one stream, in the order given."""
    build = ScheduleBuilder.of("roles", data=2)
    groups = {name: build.group(name, "data") for name in ("x", "y")}
    for name, start, order in (("one", 0, first), ("two", 1, second)):
        part = build.role(name, Span(axis="data", start=start, end=start + 1))
        buffers = {key: part.buffer(key, 8) for key in ("x", "y")}
        part.step.allocate(*buffers.values())
        for key in order:
            part.step.all_reduce(key, groups[key], buffers[key].all)
    return build.schedule()


def test_a_deadlock_ends_the_run_and_names_the_operations_that_wait() -> None:
    with pytest.raises(RunFailedError) as caught:
        run(roles(["x", "y"], ["y", "x"]))
    first, *rest = str(caught.value).splitlines()
    assert first == "deadlock: 2 operations wait for ever"
    assert [line.strip() for line in rest] == [
        "one: step/x on communication waits for 1 of 2 members of group x",
        "two: step/y on communication waits for 1 of 2 members of group y",
    ]


def test_a_missing_collective_is_a_deadlock() -> None:
    with pytest.raises(RunFailedError, match="one: step/y on communication waits for 1 of 2"):
        run(roles(["x", "y"], ["x"]))


def test_collectives_that_do_not_match_end_the_run() -> None:
    build = ScheduleBuilder.of("mismatch", data=2)
    group = build.group("data", "data")
    for name, start, size in (("one", 0, 8), ("two", 1, 9)):
        part = build.role(name, Span(axis="data", start=start, end=start + 1))
        x = part.buffer("x", size)
        part.step.allocate(x)
        part.step.all_reduce("sum", group, x.all)
    with pytest.raises(RunFailedError, match="step/sum of role two meets step/sum of role one"):
        run(build.schedule())


def shift(*, together: bool) -> Schedule:
    build = ScheduleBuilder.of("shift", data=4)
    group = build.group("data", "data")
    x, y = build.buffer("x", 25), build.buffer("y", 25)
    build.step.allocate(x, y)
    build.step.send("send", group, x.all, 1)
    build.step.receive("receive", group, y.all, -1)
    if together:
        build.step.together("both", 2)
    return build.schedule()


def test_a_lone_send_is_a_rendezvous_and_a_ring_of_them_hangs() -> None:
    with pytest.raises(RunFailedError, match=r"waits for the Receive of member \+1 on group data"):
        run(shift(together=False))
    # 100 bytes at 10 ps and two hops of 7 ps.
    assert times(run(shift(together=True)))["both"] == (0, 1014)


def test_a_pipeline_of_roles_sends_from_one_to_the_next() -> None:
    build = ScheduleBuilder.of("pipeline", pipe=3)
    group = build.group("pipe", "pipe")
    for index in range(3):
        part = build.role(f"stage{index}", Span(axis="pipe", start=index, end=index + 1))
        x = part.buffer("x", 25)
        part.step.allocate(x)
        if index > 0:
            part.step.receive("receive", group, x.all, -1)
        if index < 2:
            part.step.send("send", group, x.all, 1)
    trace = run(build.schedule())
    assert times(trace, 1) == {"receive": (0, 1014), "send": (1014, 2028)}
    assert times(trace, 2) == {"receive": (0, 2028)}


def test_a_branch_runs_the_list_that_the_scenario_names() -> None:
    build = ScheduleBuilder.of("branch", data=4)
    group = build.group("data", "data")
    flag, x = build.buffer("flag", 1), build.buffer("x", 25)
    build.step.allocate(flag, x)
    summed = build.step.all_reduce("flag", group, flag.all)
    then, otherwise = build.step.side("then"), build.step.side("otherwise")
    skipped = then.fill("skip", x.all, 0.0)
    updated = otherwise.fill("update", x.all, 0.0)
    build.step.branch("overflow", flag.all, then, otherwise, after=[summed])
    build.step.fill("after", x.all, 0.0, stream=COMMUNICATION, after=[skipped, updated])
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=CLUSTER, steps=2)
    trace = SimBackend(overflow_steps=frozenset({1})).run(job, seed=0)
    (rank,) = trace.ranks
    names = [(event.step, event.operation.split("/")[-1]) for event in rank.events]
    assert [name for step, name in names if step == 0] == ["flag", "update", "after"]
    assert [name for step, name in names if step == 1] == ["flag", "skip", "after"]


def test_out_of_memory_is_an_outcome_with_a_witness() -> None:
    build = ScheduleBuilder.of("large", data=1)
    small, large = build.buffer("small", 100), build.buffer("large", 10**6)
    build.step.allocate(small, large)
    build.step.fill("fill", small.all, 0.0)
    trace = run(build.schedule())
    found = trace.out_of_memory
    assert found is not None
    assert (found.operation, found.needed_bytes, found.capacity_bytes) == (
        "step/large/allocate",
        4 * 10**6 + 400,
        10**6,
    )
    assert found.alive == (("large", 4 * 10**6), ("small", 400))
    assert trace.step_end_ps == (400,)


def test_more_ranks_than_gpus_are_refused_with_the_field() -> None:
    schedule, _ = gather(2, 4)
    job = Job(schedule=schedule, model=NO_MODEL, cluster=CLUSTER)
    expected = "cluster.nodes: 1 must be at least 2 for 8 ranks, with gpus_per_node = 4"
    assert SimBackend().refusal(job) == expected
    with pytest.raises(RefusedError, match=r"cluster\.nodes"):
        SimBackend().run(job, seed=0)


def test_an_edge_to_what_is_issued_later_is_refused() -> None:
    build = ScheduleBuilder.of("later", data=1)
    x = build.buffer("x", 1)
    build.step.allocate(x)
    build.step.fill("one", x.all, 0.0, after=["step/two"])
    build.step.fill("two", x.all, 0.0)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=CLUSTER)
    assert SimBackend().refusal(job) == "step/one: waits for step/two, which the host issues later"


def test_a_trace_says_that_nothing_has_been_validated() -> None:
    error_text = run(*gather(1, 4)).error_text
    assert error_text.startswith("unknown: ")
    assert "\n" not in error_text
