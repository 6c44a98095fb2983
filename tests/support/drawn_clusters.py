"""What Hypothesis draws to simulate: clusters of any shape, and schedules that cannot hang."""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from hypothesis import strategies as st

from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Gpu, Link, Rate, Tier
from zsim.cluster.fabric_kind import EXPLICIT, SHIPPED, SINGLE_SWITCH
from zsim.cluster.fault import (
    DeadEdge,
    DeadNic,
    DeadSwitchLink,
    DeadUplinks,
    Fault,
    Neighbour,
    SlowEdge,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim.cluster.host_side import CopyRates, Cpu, Drives, Host
from zsim.cluster.links import has_rails
from zsim.cluster.profile.host_launch import NAMES, LaunchCosts
from zsim.dtype import BlockFormat, DType
from zsim.model.model import BATCH, Model, Segment, Unit, Value
from zsim.schedule.builder import COMMUNICATION, COMPUTE, RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import FreeMode
from zsim.schedule.schedule import Place, Pool, Schedule

RATES = tuple(
    Rate(dtype=dtype, peak=3 * 10**12, matmul=2 * 10**12, elementwise=10**12)
    for dtype in (*DType, *BlockFormat)
)

THIRD = "third"
STREAMS = (COMMUNICATION, COMPUTE, THIRD)
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "shift")

NO_MODEL = Model(
    name="nothing to train",
    units=(
        Unit(
            name="unit",
            parameters=(),
            segments=(
                Segment(
                    inputs=(BATCH,), outputs=(Value(name="loss", elements=1, dtype=DType.FP32),)
                ),
            ),
        ),
    ),
    batch=Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False),
)
"""Stands beside a schedule that was written without a model."""


@st.composite
def clusters(draw: st.DrawFn, ranks: int) -> Cluster:
    """A cluster with at least `ranks` GPUs: numbers of GPUs and NICs that need not divide."""
    gpus_per_node = draw(st.integers(1, max(2, ranks)))
    nodes = -(-ranks // gpus_per_node) + draw(st.integers(0, 1))
    fabric = draw(st.one_of(fabrics(), fabrics(), fabrics(), explicit_fabrics(nodes)))
    below = [tier.nodes_below for tier in fabric.tiers]
    domains = [n for n in (1, 1, 2, 3) if all(b % n == 0 or n % b == 0 for b in below)]
    nodes_per_domain = draw(st.sampled_from(domains))
    has_boards = nodes_per_domain == 1 and gpus_per_node % 2 == 0 and draw(st.booleans())
    pcie = draw(st.sampled_from([None, Link(bytes_per_s=2 * 10**8)]))
    per_switch = draw(st.integers(1, gpus_per_node))
    ports = draw(st.sampled_from([None, None, 1, 2]))
    return Cluster(
        fabric=fabric,
        nodes_per_domain=nodes_per_domain,
        pcie_link=pcie,
        gpus_per_pcie_switch=per_switch,
        gpus_per_root_port=None if ports is None else ports * per_switch,
        copies=None if pcie is None else draw(copies()),
        host=draw(hosts()),
        drives=DRIVES,
        board_link=draw(links()) if has_boards else None,
        name="drawn",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=Gpu(
            name="drawn GPU",
            memory_bytes=10**12,
            memory_bytes_per_s=draw(st.sampled_from([10**9, 7 * 10**9, 10**12])),
            rates=RATES,
            launch=draw(launches()),
            collective_share=draw(st.sampled_from([Fraction(0), Fraction(1, 4)])),
        ),
        switch_link=draw(links()),
        nics_per_node=draw(st.integers(1, 5)),
        nic_link=draw(links()),
    )


def copies() -> st.SearchStrategy[CopyRates | None]:
    """What copies reach of links of 200 MB/s: often all of it, or less."""
    some = CopyRates(
        to_gpu_bytes_per_s=15 * 10**7,
        from_gpu_bytes_per_s=17 * 10**7,
        both_ways_bytes_per_s=10**8,
        latency_ps=13,
    )
    return st.sampled_from([None, some, replace(some, both_ways_bytes_per_s=17 * 10**7)])


CPU = Cpu(
    sockets=2, cores_per_socket=8, adam_share=Fraction(1, 2), elementwise_share=Fraction(1, 3)
)
DRIVES = Drives(
    count=2,
    capacity_bytes=10**13,
    read_bytes_per_s=10**8,
    write_bytes_per_s=6 * 10**7,
    latency_ps=7,
)


def hosts() -> st.SearchStrategy[Host]:
    """Hosts whose memory may be slower than their links."""
    speeds = st.sampled_from([10**8, 10**11])
    size = st.just(10**12)
    return st.builds(Host, memory_bytes=size, memory_bytes_per_s=speeds, cpu=st.just(CPU))


def launches() -> st.SearchStrategy[LaunchCosts]:
    """What a host spends: often nothing, or each cost for itself."""
    each = st.sampled_from([0, 10, 5000])
    return st.one_of(st.just(LaunchCosts()), st.builds(LaunchCosts, **dict.fromkeys(NAMES, each)))


@st.composite
def explicit_fabrics(draw: st.DrawFn, nodes: int, *, fast: bool = False) -> Fabric:
    """Nodes on one or two of some switches, which have several ways to each other.

    If it is to be `fast`, links are, and have no latency.
    """
    quick = st.sampled_from([10, 25, 100]).map(lambda each: Link(bytes_per_s=each * 10**9))
    switches = [f"s{each}" for each in range(draw(st.integers(1, 4)))]
    ends = {*pairwise(switches), (switches[-1], switches[0])}
    ends |= draw(
        st.sets(st.tuples(st.sampled_from(switches), st.sampled_from(switches)), max_size=3)
    )
    for node in range(nodes):
        plugs = st.sets(st.sampled_from(switches), min_size=1, max_size=2)
        ends |= {(f"node{node}", switch) for switch in draw(plugs)}
    kept: dict[frozenset[str], tuple[str, str]] = {}
    for pair in sorted(ends):
        kept.setdefault(frozenset(pair), pair)
    edges = [
        FabricEdge(source=one, target=other, link=draw(quick if fast else links()))
        for one, other in kept.values()
        if one != other
    ]
    return Fabric(kind=EXPLICIT, edges=tuple(edges))


@st.composite
def fabrics(draw: st.DrawFn, *, latencies: bool = True) -> Fabric:
    """Any fabric of up to three levels, without latencies if they are not wanted."""
    kind = draw(st.sampled_from([kind for kind in SHIPPED if not kind.has_edges]))
    if kind == SINGLE_SWITCH:
        return Fabric()
    tiers: list[Tier] = []
    below = 1
    for name in draw(st.sampled_from([("leaf",), ("leaf", "spine")])):
        below *= draw(st.integers(1, 3)) if not tiers else draw(st.integers(2, 3))
        oversubscription = Fraction(draw(st.sampled_from([1, 2, 3])))
        latency_ps = draw(st.sampled_from([0, 11])) if latencies else 0
        tiers.append(
            Tier(
                name=name,
                nodes_below=below,
                oversubscription=oversubscription,
                latency_ps=latency_ps,
            )
        )
    return Fabric(kind=kind, tiers=tuple(tiers))


@st.composite
def troubles(
    draw: st.DrawFn, cluster: Cluster, ranks: int
) -> tuple[tuple[Fault, ...], tuple[Neighbour, ...]]:
    """Now and then faults and neighbours of any kind but jitter, at any time."""
    factors = st.sampled_from([Fraction(2), Fraction(7, 3)])
    windows = st.sampled_from([Window(), Window(start_ps=500), Window(start_ps=9, end_ps=10**6)])
    nodes = st.integers(0, cluster.nodes - 1)
    nics = st.integers(0, cluster.nics_per_node - 1)
    rank = st.integers(0, ranks - 1)
    kinds: list[st.SearchStrategy[Fault]] = [
        st.builds(SlowGpu, rank=rank, factor=factors, window=windows),
        st.builds(SlowSwitchLink, rank=rank, factor=factors, window=windows),
        st.builds(DeadSwitchLink, rank=rank, window=windows),
        st.builds(SlowNic, node=nodes, nic=nics, factor=factors, window=windows),
        st.builds(DeadNic, node=nodes, nic=nics, window=windows),
    ]
    rails = min(cluster.gpus_per_node, cluster.nics_per_node)
    for tier, each in enumerate(cluster.fabric.tiers):
        groups = st.integers(0, -(-cluster.nodes // each.nodes_below) - 1)
        rail = st.none() | st.integers(0, rails - 1) if has_rails(cluster, tier) else st.none()
        where = {"tier": st.just(tier), "group": groups, "rail": rail, "window": windows}
        kinds.append(st.builds(SlowUplinks, factor=factors, **where))
        kinds.append(st.builds(DeadUplinks, **where))
    for edge in cluster.fabric.edges:
        ends = {"source": st.just(edge.source), "target": st.just(edge.target)}
        kinds.append(st.builds(SlowEdge, factor=factors, window=windows, **ends))
        kinds.append(st.builds(DeadEdge, window=windows, **ends))
    faults = draw(st.lists(st.one_of(kinds), max_size=2))
    neighbours: list[Neighbour] = []
    if cluster.nodes > 1 and draw(st.booleans()):
        first = draw(st.integers(0, cluster.nodes - 2))
        neighbours.append(
            Neighbour(
                first_node=first,
                last_node=draw(st.integers(first + 1, cluster.nodes - 1)),
                bytes_per_s=draw(st.sampled_from([10**6, 10**10])),
                window=draw(windows),
            )
        )
    return tuple(faults), tuple(neighbours)


@st.composite
def links(draw: st.DrawFn) -> Link:
    """A link whose speed may be an awkward number."""
    return Link(
        bytes_per_s=draw(st.sampled_from([10**9, 3 * 10**8, 7_000_003])),
        latency_ps=draw(st.sampled_from([0, 1, 999])),
    )


@dataclass(frozen=True)
class Meeting:
    """One collective that every rank issues: on which group and stream, of what kind and size."""

    group: str
    ranks: int
    stream: str
    kind: str
    elements: int
    follows: bool


@st.composite
def harmless_schedules(draw: st.DrawFn) -> Schedule:
    """One or two roles that issue the same collectives in the same order, and their own kernels.

    Two axes, groups along each and along both, three streams, all kinds of collectives.
    """
    first, second = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    build = ScheduleBuilder.of("drawn", first=first, second=second)
    build.stream(THIRD)
    build.pools.append(Pool(name="host", place=Place.HOST))
    sizes = {
        build.group("rows", "first"): first,
        build.group("columns", "second"): second,
        build.group("all", "first", "second"): first * second,
    }
    parts: list[RoleBuilder] = [build]
    if split := draw(st.integers(0, first - 1)):
        low, high = (
            Span(axis="first", start=0, end=split),
            Span(axis="first", start=split, end=first),
        )
        parts = [build.role("low", low), build.role("high", high)]
        for part, span in zip(parts, (low, high), strict=True):
            build.group(f"only {part.name}", "first", where=(span,))
    meetings = [
        Meeting(group, sizes[group], stream, kind, elements, follows)
        for group, stream, kind, elements, follows in draw(
            st.lists(
                st.tuples(
                    st.sampled_from(list(sizes)),
                    st.sampled_from(STREAMS),
                    st.sampled_from(KINDS),
                    st.integers(0, 40),
                    st.booleans(),
                ),
                max_size=8,
            )
        )
    ]
    for part in parts:
        before: list[str] = []
        for index, meeting in enumerate(meetings):
            if draw(st.booleans()):
                write_kernel(draw, part, index, before)
            if draw(st.booleans()):
                write_copy(draw, part, index, before)
            before = [write_meeting(part, index, meeting, before if meeting.follows else [])]
            if split and draw(st.booleans()):
                write_own(part, index, draw(st.sampled_from(STREAMS)))
    return build.schedule()


def write_kernel(draw: st.DrawFn, part: RoleBuilder, index: int, before: list[str]) -> None:
    """Something that takes time on a stream of one role alone, and memory."""
    work = part.buffer(f"work{index}", draw(st.integers(0, 3000)))
    part.step.allocate(work)
    after = before if draw(st.booleans()) else []
    stream = draw(st.sampled_from(STREAMS))
    done = part.step.fill(f"fill{index}", work.all, 0.0, stream=stream, after=after)
    part.step.free(work, mode=draw(st.sampled_from(FreeMode)), uses=[done])


def write_copy(draw: st.DrawFn, part: RoleBuilder, index: int, before: list[str]) -> None:
    """Bytes between device memory and the host's, of one role alone."""
    elements = draw(st.integers(0, 300))
    here = part.buffer(f"here{index}", elements)
    there = part.buffer(f"there{index}", elements, pool="host")
    part.step.allocate(here, there)
    ends = [here.all, there.all] if draw(st.booleans()) else [there.all, here.all]
    stream = draw(st.sampled_from(STREAMS))
    done = part.step.copy(f"copy{index}", *ends, stream=stream, after=before)
    part.step.free(here, there, uses=[done])


def write_own(part: RoleBuilder, index: int, stream: str) -> None:
    """A collective among the ranks of one role."""
    x = part.buffer(f"own{index}", 16)
    part.step.allocate(x)
    done = part.step.all_reduce(f"own{index}", f"only {part.name}", x.all, stream=stream)
    part.step.free(x, uses=[done])


def write_meeting(part: RoleBuilder, index: int, meeting: Meeting, after: list[str]) -> str:
    """The collective, with buffers of its own."""
    step, group, stream = part.step, meeting.group, meeting.stream
    small = part.buffer(f"small{index}", meeting.elements)
    large = part.buffer(f"large{index}", meeting.elements * meeting.ranks)
    step.allocate(small, large)
    name = f"collective{index}"
    match meeting.kind:
        case "all_gather":
            done = step.all_gather(name, group, small.all, large.all, stream=stream, after=after)
        case "reduce_scatter":
            done = step.reduce_scatter(
                name, group, large.all, small.all, stream=stream, after=after
            )
        case "all_reduce":
            done = step.all_reduce(name, group, large.all, stream=stream, after=after)
        case "broadcast":
            done = step.broadcast(name, group, small.all, stream=stream, after=after)
        case _:
            target = part.buffer(f"target{index}", meeting.elements)
            step.allocate(target)
            offset = 1 + meeting.elements % 3
            step.send(f"{name}/send", group, small.all, offset, stream=stream)
            step.receive(f"{name}/receive", group, target.all, -offset, stream=stream)
            done = step.together(name, 2, after=after)
            step.free(target, uses=[done])
    step.free(small, large, uses=[done])
    return done
