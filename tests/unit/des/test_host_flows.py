"""Copies, kernels on host threads and drive traffic share the host side of a node."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from drawn_clusters import NO_MODEL
from hypothesis import given
from hypothesis import strategies as st

import zsim_topologies
from zsim.analysis.exposed_time import step_parts
from zsim.analysis.summary import step_of
from zsim.backend.backend import Job, RefusedError
from zsim.cluster.cluster import Cluster, ClusterError, Gpu, Link
from zsim.cluster.host_links import HostFlow
from zsim.cluster.host_side import CopyRates, Cpu, Drives, Host, HostKernel
from zsim.compute.drive import DriveAccess
from zsim.compute.host_kernel import host_kernel_ps
from zsim.compute.host_rate import equal_bytes_per_s, node_copy_bytes_per_s
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Action, Role, View
from zsim.schedule.schedule import Place, Pool, Schedule
from zsim.strategy.offload import Offload
from zsim.strategy.optimizer_rule import Adam
from zsim.strategy.strategy import Strategy, Zero
from zsim_des import SimBackend
from zsim_des.network.carried import Carried
from zsim_des.network.communicator_placement import Used
from zsim_des.network.max_min_fair import Shape, fair_rates
from zsim_des.symmetry.fault_state import Disturbances
from zsim_des.symmetry.fold import fold
from zsim_des.symmetry.folded_links import FoldedLinkTable, shapes

SECOND = 10**12
DGX2 = zsim_topologies.load("dgx2_infiniband")
HALF_BILLION = 5 * 10**8


def without_latency(cluster: Cluster) -> Cluster:
    assert cluster.copies is not None
    return replace(cluster, copies=replace(cluster.copies, latency_ps=0))


def copies(ranks: int, *directions: str, elements: int = 2**24) -> Schedule:
    """Every rank copies fp32 elements to or from its host, both at once if both are asked for."""
    build = ScheduleBuilder.of("copies", data=ranks)
    build.pools.append(Pool(name="host", place=Place.HOST))
    for number, direction in enumerate(directions):
        here = build.buffer(f"here{number}", elements)
        there = build.buffer(f"there{number}", elements, pool="host")
        build.step.allocate(here, there)
        ends = [here.all, there.all] if direction == "out" else [there.all, here.all]
        build.step.copy(f"copy{number}", *ends, stream=build.stream(f"stream{number}"))
    return build.schedule()


def end_ps(schedule: Schedule, cluster: Cluster) -> int:
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster)
    ends = {SimBackend(unfold=unfold).step_ends_ps(job)[0] for unfold in (False, True)}
    assert len(ends) == 1  # whether ranks are folded or not
    return ends.pop()


def gb_per_s(schedule: Schedule, cluster: Cluster) -> float:
    """Rate of each copy of 64 MiB, which end together."""
    return 2**26 / end_ps(schedule, cluster) * SECOND / 1e9


def test_a_dgx_2_copies_12_gb_per_s_to_one_gpu_and_3_to_each_of_all() -> None:
    # ZeRO-Infinity (arXiv 2104.07857), figure 2b.
    node = without_latency(DGX2)
    assert gb_per_s(copies(1, "in"), node) == pytest.approx(12.0, rel=1e-6)
    assert gb_per_s(copies(16, "in"), node) == pytest.approx(3.0, rel=1e-6)
    assert gb_per_s(copies(4, "in"), node) == pytest.approx(3.0, rel=1e-6)  # on one root port
    assert node_copy_bytes_per_s(DGX2, outward=False) == 48 * 10**9


def owned(ranks: int, size: int) -> Schedule:
    """Each rank copies to its host what it owns of `size` elements; its segment has 2^24."""
    build = ScheduleBuilder.of("owned", data=ranks)
    build.pools.append(Pool(name="host", place=Place.HOST))
    whole = ranks * 2**24
    pieces = (Piece(parameter="w", start=0, size=whole),)
    layout = build.layout(Layout(name="cut", pieces=pieces, elements=whole, axis="data"))
    here = build.buffer("here", size)
    there = build.buffer("there", 2**24, pool="host", layout=layout, shard="data")
    build.step.allocate(here, there)
    source = View(buffer="here", start=0, size=size, layout=layout, origin=0)
    target = View(buffer="there", start=0, size=size, layout=layout)
    build.step.copy("copy", source, target, stream=build.stream("out"))
    return build.schedule()


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_a_tensor_that_one_rank_owns_is_copied_as_fast_as_by_one_rank(ranks: int) -> None:
    """DeepSpeed's stages 1 and 2 cut a row of whole parameters: others wait for their owner."""
    node = without_latency(DGX2)
    assert gb_per_s(owned(ranks, 2**24), node) == pytest.approx(13.1, rel=1e-6)


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_a_tensor_that_all_ranks_own_alike_is_copied_by_all(ranks: int) -> None:
    node = without_latency(DGX2)
    assert end_ps(owned(ranks, ranks * 2**24), node) == end_ps(copies(ranks, "out"), node)


def test_both_directions_at_once_are_slower_than_one() -> None:
    node = without_latency(DGX2)
    out, into = gb_per_s(copies(1, "out"), node), gb_per_s(copies(1, "in"), node)
    both = gb_per_s(copies(1, "out", "in"), node)
    assert out == pytest.approx(13.1, rel=1e-6)
    assert into == pytest.approx(12.0, rel=1e-6)
    assert both == pytest.approx(8.59, rel=1e-6)


def test_a_copy_takes_its_latency_beside_its_bytes() -> None:
    assert DGX2.copies is not None
    waited = end_ps(copies(1, "in"), DGX2) - end_ps(copies(1, "in"), without_latency(DGX2))
    assert waited == DGX2.copies.latency_ps


def adam(ranks: int, *, beside: bool = False, elements: int = HALF_BILLION) -> Schedule:
    """Every rank updates parameters on host threads, perhaps beside a copy of as many bytes."""
    build = ScheduleBuilder.of("adam", data=ranks)
    build.pools.append(Pool(name="host", place=Place.HOST))
    names = ("gradient", "master", "first", "second")
    states = [build.buffer(name, elements, pool="host") for name in names]
    here = build.buffer("here", elements)
    build.step.allocate(here, *states)
    roles = (Role.GRADIENT, Role.MASTER, Role.MOMENT, Role.MOMENT)
    operands = [(role, state.all) for role, state in zip(roles, states, strict=True)]
    threads, step = build.stream("threads"), build.scalar("step", 0.0)
    build.step.compute("adam", Action.UPDATE, operands, stream=threads, rule=Adam(), scalars=[step])
    if beside:
        build.step.copy("copy", here.all, states[0].all, stream=build.stream("copies"))
    return build.schedule()


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_adam_on_host_threads_takes_what_it_was_measured_to_and_ranks_share_the_cores(
    ranks: int,
) -> None:
    # ZeRO-Offload (arXiv 2101.06840), table 4: 2 billion parameters in 0.51 s with all cores.
    taken = end_ps(adam(ranks), DGX2)
    expected = host_kernel_ps(HostKernel.ADAM, HALF_BILLION, DGX2, ranks=ranks)
    assert taken == pytest.approx(expected, rel=1e-6)
    assert taken / SECOND == pytest.approx(ranks * 0.51 / 4, rel=0.02)


def test_copies_and_kernels_share_host_memory_where_there_is_little_of_it() -> None:
    assert DGX2.host is not None
    assert DGX2.host.cpu is not None
    node = without_latency(DGX2)
    alone = end_ps(adam(1), node), end_ps(copies(1, "out", elements=HALF_BILLION), node)
    assert end_ps(adam(1, beside=True), node) == max(alone)  # 109 and 13 of 256 GB/s
    cpu = replace(DGX2.host.cpu, adam_share=Fraction(1))
    little = replace(DGX2, host=replace(DGX2.host, memory_bytes_per_s=20 * 10**9, cpu=cpu))
    both_bytes = (28 + 4) * HALF_BILLION
    assert end_ps(adam(1, beside=True), little) == pytest.approx(
        both_bytes / 20e9 * SECOND, rel=1e-3
    )


def test_a_cast_on_the_host_is_a_kernel_there_and_takes_no_time_of_the_gpu() -> None:
    build = ScheduleBuilder.of("cast", data=1)
    build.pools.append(Pool(name="host", place=Place.HOST))
    source, target = (build.buffer(name, 10**9, pool="host") for name in ("wide", "narrow"))
    build.step.allocate(source, target)
    build.step.copy("cast", source.all, target.all)
    assert DGX2.host is not None
    assert DGX2.host.cpu is not None
    rate = DGX2.host.memory_bytes_per_s * DGX2.host.cpu.elementwise_share
    assert end_ps(build.schedule(), DGX2) == pytest.approx(8e9 / rate * SECOND, rel=1e-6)


def test_a_kernel_on_host_threads_needs_cpus_that_are_described() -> None:
    assert DGX2.host is not None
    bare = replace(DGX2, host=replace(DGX2.host, cpu=None))
    job = Job(schedule=adam(1), model=NO_MODEL, cluster=bare)
    with pytest.raises(RefusedError, match=r"^cpu: dgx2_infiniband describes none") as caught:
        SimBackend().run(job, seed=0)
    assert "\n" not in str(caught.value)
    assert SimBackend().refusal(job) == str(caught.value)


def rates(
    cluster: Cluster, flows: Sequence[Carried], ranks: int = 1
) -> list[tuple[HostFlow, Fraction]]:
    """Bytes per second of each flow, if every rank has all of them at once."""
    schedule = copies(ranks, "in")
    kinds = tuple(sorted({each.flow for each in flows}))
    trouble = Disturbances((), (), cluster=cluster, seed=0)
    folded = fold(schedule, trouble, used=Used({}, frozenset(), kinds))
    table = FoldedLinkTable(folded, trouble)
    taken: list[tuple[HostFlow, Shape]] = []
    for rank_class in folded.ranks:
        for flow in flows:
            loads = table.carried(rank_class, flow)
            assert loads is not None
            taken.append((flow.flow, shapes(loads)[0]))
    found = fair_rates([shape for _, shape in taken], [each.bytes_per_s for each in table.classes])
    return list(zip([flow for flow, _ in taken], found, strict=True))


def moved(flow: HostFlow, access: DriveAccess | None = None) -> Carried:
    return Carried(flow, 2**30, access=access)


def test_ranks_share_the_drives_of_a_node() -> None:
    assert dict(rates(DGX2, [moved(HostFlow.READ)])) == {HostFlow.READ: 28 * 10**9}
    shared = rates(DGX2, [moved(HostFlow.READ)], ranks=16)
    assert {rate for _, rate in shared} == {Fraction(28 * 10**9, 16)}


def test_reads_and_writes_take_turns_on_the_drives() -> None:
    assert DGX2.drives is not None
    slow = replace(DGX2, drives=replace(DGX2.drives, write_bytes_per_s=7 * 10**8))
    both = dict(rates(slow, [moved(HostFlow.READ), moved(HostFlow.WRITE)]))
    alone = dict(rates(slow, [moved(HostFlow.WRITE)]))
    assert alone[HostFlow.WRITE] == 8 * 7 * 10**8
    # A byte read and a byte written take what each takes alone, one after the other.
    assert 1 / both[HostFlow.READ] == Fraction(1, 28 * 10**9) + 1 / alone[HostFlow.WRITE]
    assert both[HostFlow.READ] == both[HostFlow.WRITE]


def test_few_blocks_in_flight_do_not_keep_all_drives_busy() -> None:
    few = DriveAccess(block_bytes=4096, queue_depth=1, threads=4)
    (found,) = rates(DGX2, [moved(HostFlow.READ, few)])
    assert DGX2.drives is not None
    each_s = DGX2.drives.latency_ps / SECOND + 4096 / 3.5e9
    assert float(found[1]) == pytest.approx(4 * 4096 / each_s, rel=1e-6)
    two_drives = DriveAccess(threads=8, queue_depth=1, drives=2)
    assert rates(DGX2, [moved(HostFlow.READ, two_drives)])[0][1] == 2 * 35 * 10**8


@pytest.mark.parametrize(
    ("offload", "blocks"),
    [(Offload(block_bytes=4096, queue_depth=1), 1), (Offload(block_bytes=4096, io_threads=3), 24)],
)
def test_a_strategy_says_how_many_blocks_of_what_size_are_in_flight(
    offload: Offload, blocks: int
) -> None:
    build = ScheduleBuilder.of("reads", data=1)
    build.pools += [Pool(name="host", place=Place.HOST), Pool(name="files", place=Place.NVME)]
    there = build.buffer("there", 2**22, pool="files")
    here = build.buffer("here", 2**22, pool="host")
    build.step.allocate(there, here)
    build.step.read("read", there.all, here.all, stream=build.stream("handle"))
    made = build.schedule()
    schedule = replace(
        made,
        contract=replace(made.contract, strategy=Strategy(zero=Zero(stage=1), offload=offload)),
    )
    assert DGX2.drives is not None
    each_s = DGX2.drives.latency_ps / SECOND + 4096 / 3.5e9
    seconds = 2**24 / (blocks * 4096 / each_s) + DGX2.drives.latency_ps / SECOND
    assert end_ps(schedule, DGX2) / SECOND == pytest.approx(seconds, rel=1e-4)


def test_a_read_straight_to_the_gpu_leaves_host_memory_alone() -> None:
    assert DGX2.host is not None
    narrow = replace(DGX2, host=replace(DGX2.host, memory_bytes_per_s=10**9))
    through = dict(rates(narrow, [moved(HostFlow.READ)]))[HostFlow.READ]
    straight = dict(rates(narrow, [moved(HostFlow.READ_DIRECT)]))[HostFlow.READ_DIRECT]
    assert through == 10**9
    assert straight == 15_750_000_000  # the GPU's PCIe link


@pytest.mark.parametrize(
    ("cluster", "flow", "said"),
    [
        (replace(DGX2, drives=None), HostFlow.READ, "drives: dgx2_infiniband describes none"),
        (
            replace(DGX2, drives=Drives(count=1, capacity_bytes=1, read_bytes_per_s=1)),
            HostFlow.WRITE,
            "drives: write_bandwidth: not known of this node",
        ),
        (
            replace(DGX2, pcie_link=None, copies=None),
            HostFlow.READ_DIRECT,
            "pcie: dgx2_infiniband describes none",
        ),
    ],
)
def test_what_a_node_lacks_is_said_in_a_line(cluster: Cluster, flow: HostFlow, said: str) -> None:
    with pytest.raises(ClusterError, match=f"^{re.escape(said)}") as caught:
        rates(cluster, [moved(flow)])
    assert "\n" not in str(caught.value)


NODES = st.builds(
    lambda gpus, per_switch, switches, copies, memory: Cluster(
        name="drawn",
        nodes=1,
        gpus_per_node=gpus,
        gpu=Gpu(name="drawn", memory_bytes=10**12, memory_bytes_per_s=10**12, rates=()),
        switch_link=Link(bytes_per_s=10**11),
        nics_per_node=1,
        nic_link=Link(bytes_per_s=10**10),
        pcie_link=Link(bytes_per_s=16 * 10**9),
        gpus_per_pcie_switch=per_switch,
        gpus_per_root_port=None if switches is None else switches * per_switch,
        copies=copies,
        host=Host(
            memory_bytes=10**12,
            memory_bytes_per_s=memory,
            cpu=Cpu(
                sockets=1,
                cores_per_socket=8,
                adam_share=Fraction(1, 2),
                elementwise_share=Fraction(1, 3),
            ),
        ),
    ),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([None, 1, 2]),
    st.sampled_from(
        [
            None,
            CopyRates(
                to_gpu_bytes_per_s=12 * 10**9,
                from_gpu_bytes_per_s=13 * 10**9,
                both_ways_bytes_per_s=8 * 10**9,
            ),
        ]
    ),
    st.sampled_from([5 * 10**9, 30 * 10**9, 2 * 10**11]),
)
FLOWS = {"out": HostFlow.COPY_OUT, "in": HostFlow.COPY_IN}


def slowest_copy(cluster: Cluster, directions: tuple[str, ...]) -> Fraction:
    """Bytes per second of the slowest of equal copies of all ranks, from the rules alone."""
    assert cluster.pcie_link is not None
    assert cluster.host is not None
    gpus, pcie = cluster.gpus_per_node, cluster.pcie_link.bytes_per_s
    on_switch = min(gpus, cluster.gpus_per_pcie_switch)
    on_port = min(gpus, cluster.gpus_per_root_port or cluster.gpus_per_pcie_switch)
    limits = [
        Fraction(pcie, on_switch),
        Fraction(pcie, on_port),
        Fraction(cluster.host.memory_bytes_per_s, gpus * len(directions)),
    ]
    if (measured := cluster.copies) is not None:
        alone = {"in": measured.to_gpu_bytes_per_s, "out": measured.from_gpu_bytes_per_s}
        limits += [Fraction(alone[each], on_port) for each in directions]
        limits.append(Fraction(2 * measured.both_ways_bytes_per_s, on_port * len(directions)))
    return min(limits)


@given(NODES, st.sampled_from([("out",), ("in",), ("out", "in")]))
def test_the_slowest_of_equal_copies_is_as_fast_as_the_fullest_link_allows(
    cluster: Cluster, directions: tuple[str, ...]
) -> None:
    slowest = slowest_copy(cluster, directions)
    flows = {FLOWS[each]: cluster.gpus_per_node for each in directions}
    assert equal_bytes_per_s(cluster, flows) == slowest
    # Flows of other ports may be faster; none is slower, and the slowest decides the end.
    taken = end_ps(copies(cluster.gpus_per_node, *directions), cluster)
    assert taken <= float(2**26 / slowest * SECOND) + 16
    if len(directions) == 1:
        assert taken == pytest.approx(float(2**26 / slowest * SECOND), abs=16)


def test_kernels_on_host_threads_hide_no_communication() -> None:
    build = ScheduleBuilder.of("beside", data=2)
    build.pools.append(Pool(name="host", place=Place.HOST))
    wide, x = build.buffer("wide", 10**9, pool="host"), build.buffer("x", 2**20)
    build.step.allocate(wide, x)
    build.step.compute(
        "unscale",
        Action.UNSCALE,
        [(Role.GRADIENT, wide.all)],
        stream=build.host_thread("threads"),
        scalars=[build.scalar("scale", 1.0)],
    )
    build.step.all_reduce("sum", build.group("group", "data"), x.all)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=DGX2)
    backend = SimBackend()
    trace = backend.run(job, seed=0)
    (reduced,) = (each for each in trace.ranks[0].events if each.operation == "step/sum")
    parts = step_parts(step_of(job, trace))
    assert parts.exposed_ps == parts.by_group["group"] == reduced.end_ps - reduced.start_ps
    assert step_parts(backend.last_step(job, seed=0)) == parts
