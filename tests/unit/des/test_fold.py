"""Classes of ranks and links, against the links that rings really use."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from drawn_clusters import clusters
from drawn_examples import examples
from drawn_outages import outages
from hypothesis import assume, given
from hypothesis import strategies as st
from link_graph import NONE, NoWayLeftError, WiredGraph, hop_name, link_bytes, ring_edges

from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Mesh, Span
from zsim.schedule.schedule import Schedule
from zsim_des.symmetry.fault_state import Disturbances
from zsim_des.symmetry.fold import fold
from zsim_des.symmetry.folded_links import FoldedLinkTable, Loads


def healthy(cluster: Cluster) -> Disturbances:
    return Disturbances((), (), cluster=cluster, seed=0)


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


class Case:
    """A schedule on a cluster of which some things are dead: its fold, and the graph of it all."""

    def __init__(self, schedule: Schedule, data: st.DataObject) -> None:
        self.cluster: Cluster = data.draw(clusters(schedule.mesh.size))
        nics, gpus = self.cluster.nics_per_node, self.cluster.gpus_per_node
        assume(nics <= gpus or nics % gpus == 0)  # else a NIC serves two GPUs in unequal parts
        faults, dead = data.draw(st.one_of(st.just(((), NONE)), outages(self.cluster)))
        trouble = Disturbances(faults, (), cluster=self.cluster, seed=0)
        self.folded = fold(schedule, trouble)
        self.links = FoldedLinkTable(self.folded, trouble)
        self.graph = WiredGraph(self.cluster, dead)

    def must_carry(self, flows: Sequence[tuple[int, int, Fraction]], loads: list[Loads]) -> None:
        """As many links carry as much in the classes as on the graph, or both find a cut."""
        try:
            carried_by = link_bytes(self.graph, flows)
        except NoWayLeftError:
            assert self.folded.cuts
            return
        assert not self.folded.cuts
        expected = Counter[tuple[str, Fraction]]()
        for (source, target), size in carried_by.items():
            expected[hop_name(source, target), size] += 1
        carried: dict[int, Fraction] = {}
        for each in loads:
            for number, size in each.items():
                carried[number] = carried.get(number, Fraction(0)) + size
        found = Counter[tuple[str, Fraction]]()
        for number, size in carried.items():
            for name in self.links.classes[number].names:
                found[name, size] += int(self.links.classes[number].count)
        assert found == expected


@pytest.mark.one_commit_in(6)
@given(grids, st.data())
@examples(200)
def test_classes_load_links_as_the_rings_of_the_full_graph_do(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Folded against unfolded, link by link, past what is dead."""
    case = Case(schedule, data)
    flows = [
        (source, target, share)
        for members in communicators(schedule.mesh, schedule)
        for (source, target), share in ring_edges(case.cluster, members).items()
    ]
    every = [each for each in case.folded.communicators if each.ranks > 1]
    case.must_carry(flows, [case.links.ring(each)[0] for each in every])


@pytest.mark.one_commit_in(6)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(-2, 3), st.data())
@examples(100)
def test_classes_load_links_as_sends_on_the_full_graph_do(
    first: int, second: int, offset: int, data: st.DataObject
) -> None:
    assume(offset % first)  # nobody sends to itself
    build = ScheduleBuilder.of("shift", first=first, second=second)
    group = build.group("group", "first")
    x, y = build.buffer("x", 1), build.buffer("y", 1)
    build.step.allocate(x, y)
    build.step.send("send", group, x.all, offset)
    build.step.receive("receive", group, y.all, -offset)
    build.step.together("shift", 2)
    schedule = build.schedule()
    case = Case(schedule, data)
    flows = [
        (source, members[(place + offset) % first], Fraction(1))
        for members in communicators(schedule.mesh, schedule)
        for place, source in enumerate(members)
    ]
    sends = [case.links.send(each, "group", offset)[0] for each in case.folded.ranks]
    case.must_carry(flows, sends)


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
