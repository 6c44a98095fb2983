"""The fluid network, held against a network of chunks and against physics."""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise

import pytest
from chunk_network import Activity, ChunkNetwork, Flow
from drawn_clusters import NO_MODEL, RATES, explicit_fabrics, fabrics
from drawn_examples import examples
from drawn_outages import outages
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from link_graph import NONE, NoWayLeftError, WiredGraph, ring_edges

from zsim.backend.backend import Job, NoRouteError
from zsim.cluster.bisection import carried
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.fault import Fault
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend
from zsim_des.clock.ready_queue import Clock
from zsim_des.network.fluid import Network
from zsim_des.network.max_min_fair import Shape

MIB = 2**20
GROUPS = {"rows": ("first",), "columns": ("second",), "all": ("first", "second")}

speeds = st.sampled_from([10, 12.5, 25, 50, 300]).map(lambda gigabytes: int(gigabytes * 10**9))


@st.composite
def small_clusters(draw: st.DrawFn, ranks: int) -> Cluster:
    """Nodes without latency on any fabric, with boards and PCIe or without."""
    gpus_per_node = draw(st.integers(1, ranks))
    nics = [count for count in range(1, gpus_per_node + 1) if gpus_per_node % count == 0]
    nodes = -(-ranks // gpus_per_node)
    made_by_hand = fabrics(latencies=False)
    boards = draw(st.none() | speeds) if gpus_per_node % 2 == 0 else None
    pcie = draw(st.none() | speeds)
    return Cluster(
        name="small",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        gpu=Gpu(name="any", memory_bytes=10**13, memory_bytes_per_s=10**12, rates=RATES),
        switch_link=Link(bytes_per_s=draw(speeds)),
        nics_per_node=draw(st.sampled_from(nics)),
        nic_link=Link(bytes_per_s=draw(speeds)),
        fabric=draw(st.one_of(made_by_hand, made_by_hand, explicit_fabrics(nodes, fast=True))),
        board_link=None if boards is None else Link(bytes_per_s=boards),
        pcie_link=None if pcie is None else Link(bytes_per_s=pcie),
        gpus_per_pcie_switch=draw(st.integers(1, gpus_per_node)),
    )


def gathers(first: int, second: int, sizes: Sequence[tuple[str, int]]) -> Schedule:
    """All-gathers ready together, each on a stream of its own: group and bytes of a shard."""
    build = ScheduleBuilder.of("gathers", first=first, second=second)
    for number, (axes, shard_bytes) in enumerate(sizes):
        group = build.group(f"group{number}", *GROUPS[axes])
        count = build.groups[-1].size(build.mesh)
        stream = build.stream(f"stream{number}")
        shard = build.buffer(f"shard{number}", shard_bytes // 4)
        whole = build.buffer(f"whole{number}", shard_bytes // 4 * count)
        build.step.allocate(shard, whole)
        build.step.all_gather(f"gather{number}", group, shard.all, whole.all, stream=stream)
    return build.schedule()


def members_of(schedule: Schedule, number: int) -> set[tuple[int, ...]]:
    """The ranks of each communicator of a group."""
    mesh, group = schedule.mesh, schedule.groups[number]
    return {group.members(mesh, mesh.coordinates(rank)) for rank in range(mesh.size)}


def rings(
    schedule: Schedule, number: int, shard_bytes: int, graph: WiredGraph
) -> dict[int, Activity]:
    """What the ring of each communicator of a group sends on the full graph, by its first rank."""
    found: dict[int, Activity] = {}
    for members in members_of(schedule, number):
        size_bytes = (len(members) - 1) * shard_bytes
        flows = [
            Flow(tuple(pairwise(way)), float(share * part * size_bytes))
            for (source, target), share in ring_edges(graph.cluster, members).items()
            for way, part in graph.ways(source, target)
        ]
        if flows:
            found[members[0]] = Activity(size_bytes, flows)
    return found


def predicted(
    schedule: Schedule, cluster: Cluster, faults: Sequence[Fault] = ()
) -> dict[tuple[str, int], int]:
    """When each collective ended, by its name and a rank in it."""
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster)
    trace = SimBackend(unfold=True, faults=faults).run(job, seed=0)
    return {
        (event.operation, rank.rank): event.end_ps for rank in trace.ranks for event in rank.events
    }


def ends_as_chunks_do(first: int, second: int, data: st.DataObject) -> None:
    """Draw a cluster, its outages and collectives, and hold the fluid network to the chunks."""
    cluster = data.draw(small_clusters(first * second))
    faults, dead = data.draw(st.one_of(st.just(((), NONE)), outages(cluster)))
    drawn = st.tuples(st.sampled_from(list(GROUPS)), st.integers(64, 192).map(lambda n: n * MIB))
    sizes = data.draw(st.lists(drawn, min_size=1, max_size=3))
    schedule = gathers(first, second, sizes)
    graph = WiredGraph(cluster, dead)
    try:
        moving = {
            (f"step/gather{number}", rank): ring
            for number, (_, shard_bytes) in enumerate(sizes)
            for rank, ring in rings(schedule, number, shard_bytes, graph).items()
        }
    except NoWayLeftError:
        with pytest.raises(NoRouteError):
            predicted(schedule, cluster, faults)
        return
    assume(moving)
    ends = predicted(schedule, cluster, faults)
    network = ChunkNetwork({link: float(each) for link, each in graph.capacities().items()})
    for name, end_s in zip(moving, network.ends_s(list(moving.values())), strict=True):
        assert abs(ends[name] / (end_s * 1e12) - 1) < 0.03


NOT_SHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)


@pytest.mark.one_commit_in(9)
@given(st.integers(1, 3), st.integers(2, 4), st.data())
@settings(deadline=None, max_examples=6, phases=NOT_SHRUNK)
def test_collectives_end_when_chunks_that_take_turns_would(
    first: int, second: int, data: st.DataObject
) -> None:
    ends_as_chunks_do(first, second, data)


@pytest.mark.long
@given(st.integers(1, 3), st.integers(2, 4), st.data())
@examples(100, phases=NOT_SHRUNK)
def test_a_hundred_drawn_clusters_move_collectives_as_chunks_do(
    first: int, second: int, data: st.DataObject
) -> None:
    ends_as_chunks_do(first, second, data)


@given(st.integers(1, 3), st.integers(2, 4), st.data())
@settings(deadline=None)
def test_no_group_of_gpus_sends_more_than_its_cut_carries(
    first: int, second: int, data: st.DataObject
) -> None:
    """Cuts are found on another graph, by max-flow; nothing dead makes them wider."""
    cluster = data.draw(small_clusters(first * second))
    faults, _ = data.draw(st.one_of(st.just(((), NONE)), outages(cluster)))
    axes, shard_bytes = data.draw(st.sampled_from(list(GROUPS))), 64 * MIB
    schedule = gathers(first, second, [(axes, shard_bytes)])
    cut = data.draw(st.integers(1, cluster.ranks - 1))
    try:
        end_ps = max(predicted(schedule, cluster, faults).values())
    except NoRouteError:
        return
    crossing = sum(
        (len(members) - 1) * shard_bytes * share
        for members in members_of(schedule, 0)
        for (source, target), share in ring_edges(cluster, members).items()
        if source < cut <= target
    )
    # What a cut carries is rounded down to a byte per second.
    assert crossing * 10**12 <= (carried(cluster, cut) + 1) * end_ps


@st.composite
def traffic(draw: st.DrawFn) -> tuple[list[int], list[tuple[Shape, int, int]]]:
    """Capacities of links, and activities: bytes on links per byte of progress, size, start."""
    capacities = draw(st.lists(st.integers(1, 400).map(lambda n: n * 10**9), min_size=1))
    loads = st.dictionaries(
        st.integers(0, len(capacities) - 1), st.fractions(Fraction(1, 8), 8), min_size=1
    ).map(lambda taken: tuple(taken.items()))
    each = st.tuples(loads, st.integers(1, 10**9), st.integers(0, 10**10))
    return capacities, draw(st.lists(each, min_size=1, max_size=8))


@given(traffic())
@settings(deadline=None)
def test_no_cut_ever_carries_more_than_its_bandwidth(
    drawn: tuple[list[int], list[tuple[Shape, int, int]]],
) -> None:
    """Every link is a cut, and no window from one change to another carries more than it can."""
    capacities, activities = drawn
    env = Clock()
    network = Network(env, capacities)
    ends = [0] * len(activities)

    def join(number: int) -> None:
        shape, size_bytes, _ = activities[number]
        network.join(network.number((shape,)), size_bytes, 0, lambda: finish(number))

    def finish(number: int) -> None:
        ends[number] = env.now

    for number, (_, _, start_ps) in enumerate(activities):
        env.at(start_ps, partial(join, number))
    env.ring_all()
    starts = [start_ps for _, _, start_ps in activities]
    for link, capacity in enumerate(capacities):
        for begin in starts:
            for end in ends:
                # What began and ended within the window crossed the link within it.
                crossed = sum(
                    dict(shape).get(link, 0) * size_bytes
                    for (shape, size_bytes, start), stop in zip(activities, ends, strict=True)
                    if begin <= start and stop <= end
                )
                assert crossed * 10**12 <= capacity * (end - begin) or not crossed
