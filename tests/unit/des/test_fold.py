"""Classes of ranks and links, against the links that rings really use."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

from drawn_clusters import clusters
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zsim.builder import ScheduleBuilder
from zsim.cluster import Cluster, Gpu, Link
from zsim.collective.ring import link_bytes, ring_edges
from zsim.mesh import Mesh, Span
from zsim.schedule import Schedule
from zsim_des.fold import fold
from zsim_des.links import Links
from zsim_des.trouble import Trouble


def healthy(cluster: Cluster) -> Trouble:
    return Trouble((), (), cluster=cluster, seed=0)


def grid(first: int, second: int, axes: tuple[str, ...]) -> Schedule:
    """Ranks on two axes that all-reduce over some of them."""
    build = ScheduleBuilder.of("grid", first=first, second=second)
    group = build.group("group", *axes)
    x = build.buffer("x", 1)
    build.step.allocate(x)
    build.step.all_reduce("sum", group, x.all)
    return build.schedule()


grids = st.builds(
    grid,
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([("first",), ("second",), ("first", "second")]),
)


def communicators(mesh: Mesh, schedule: Schedule) -> set[tuple[int, ...]]:
    (group,) = schedule.groups
    return {group.members(mesh, mesh.coordinates(rank)) for rank in range(mesh.size)}


@given(grids, st.data())
@settings(deadline=None)
def test_classes_load_links_as_the_rings_of_the_full_graph_do(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Folded against unfolded, link by link: as many links carry as much."""
    cluster: Cluster = data.draw(clusters(schedule.mesh.size))
    nics, gpus = cluster.nics_per_node, cluster.gpus_per_node
    assume(nics <= gpus or nics % gpus == 0)  # else a NIC serves two GPUs in unequal parts
    # A domain with several leaves, or not full, is entered at other nodes than it is left.
    domain, ranks = cluster.nodes_per_domain, schedule.mesh.size
    whole = all(tier.nodes_below % domain == 0 for tier in cluster.fabric.tiers)
    assume(domain == 1 or (whole and ranks % (domain * gpus) == 0))
    cluster = replace(cluster, pcie_link=None)
    flows = [
        (source, target, share)
        for members in communicators(schedule.mesh, schedule)
        for (source, target), share in ring_edges(cluster, members).items()
    ]
    expected = Counter[tuple[str, Fraction]]()
    for (source, target), size in link_bytes(cluster, flows).items():
        expected[f"{source.kind}->{target.kind}", size] += 1
    folded = fold(schedule, healthy(cluster))
    links = Links(folded, healthy(cluster))
    carried: dict[int, Fraction] = {}
    for communicator in folded.communicators:
        if communicator.ranks > 1:
            for number, size in links.ring(communicator).items():
                carried[number] = carried.get(number, Fraction(0)) + size
    found = Counter[tuple[str, Fraction]]()
    for number, size in carried.items():
        for name in links.classes[number].names:
            found[name, size] += int(links.classes[number].count)
    assert found == expected


def test_a_schedule_that_all_ranks_share_has_one_class_however_many_there_are() -> None:
    schedule = grid(400, 16, ("first",))
    link = Link(bytes_per_s=1)
    cluster = Cluster(
        name="large",
        nodes=400,
        gpus_per_node=16,
        gpu=Gpu(name="any", memory_bytes=1, memory_bytes_per_s=1, rates=()),
        switch_link=link,
        nics_per_node=8,
        nic_link=link,
    )
    folded = fold(schedule, healthy(cluster))
    (ranks,) = folded.ranks
    assert (ranks.rank, ranks.count) == (0, 6400)
    (communicator,) = folded.communicators
    assert (communicator.ranks, communicator.domains, communicator.count) == (400, 400, 16)
    # 12 GPUs per node: groups lie on nodes in more ways than one, and ranks with them.
    assert len(fold(schedule, healthy(replace(cluster, nodes=600, gpus_per_node=12))).ranks) > 1


def test_a_rank_that_does_something_else_splits_those_who_meet_it() -> None:
    build = ScheduleBuilder.of("straggler", first=3, second=2)
    group = build.group("group", "second")
    spans = {
        "slow": [Span(axis="first", start=0, end=1), Span(axis="second", start=0, end=1)],
        "peer": [Span(axis="first", start=0, end=1), Span(axis="second", start=1, end=2)],
        "rest": [Span(axis="first", start=1, end=3)],
    }
    for name, box in spans.items():
        part = build.role(name, *box)
        x = part.buffer("x", 1)
        part.step.allocate(x)
        part.step.all_reduce("sum", group, x.all)
    link = Link(bytes_per_s=1)
    cluster = Cluster(
        name="one node",
        nodes=1,
        gpus_per_node=6,
        gpu=Gpu(name="any", memory_bytes=1, memory_bytes_per_s=1, rates=()),
        switch_link=link,
        nics_per_node=6,
        nic_link=link,
    )
    folded = fold(build.schedule(), healthy(cluster))
    assert [(each.program.role, each.count) for each in folded.ranks] == [
        ("slow", 1),
        ("peer", 1),
        ("rest", 4),
    ]
    assert [(each.classes, each.count) for each in folded.communicators] == [((0, 1), 1), ((2,), 2)]
