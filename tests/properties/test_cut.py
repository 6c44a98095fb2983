"""Cuts by classes against the minimum cut of a graph in which every device stands by itself."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import networkx as nx
from drawn_clusters import RATES, links
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.bisection import bisection, carried, cuts, narrowest
from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Gpu, Link, Tier
from zsim.cluster.fabric_kind import RAIL_ONLY, RAIL_OPTIMIZED, SHIPPED, SINGLE_SWITCH

Graph = nx.Graph
RATIOS = st.fractions(min_value=Fraction(1, 2), max_value=4, max_denominator=3)


@st.composite
def fabrics(draw: st.DrawFn, nodes: int, domain: int) -> Fabric:
    """A fabric of any kind for so many nodes, whose tiers nest with domains."""
    kind = draw(st.sampled_from(SHIPPED))
    if kind == SINGLE_SWITCH:
        return Fabric()
    if kind.has_edges:
        switches = draw(st.integers(1, 3))
        tree = [(f"s{each}", f"s{draw(st.integers(0, each - 1))}") for each in range(1, switches)]
        joined = [(f"node{node}", f"s{node % switches}") for node in range(nodes)]
        return Fabric(
            kind=kind,
            edges=tuple(
                FabricEdge(source=one, target=other, link=draw(links()))
                for one, other in [*tree, *joined]
            ),
        )
    below = draw(st.sampled_from([each for each in range(1, domain + 1) if domain % each == 0]))
    sizes = draw(
        st.sampled_from([[below], [2 * domain], [below, 2 * domain], [domain, 3 * domain]])
    )
    if kind == RAIL_ONLY and draw(st.booleans()):
        sizes = []
    return Fabric(
        kind=kind,
        tiers=tuple(
            Tier(name=f"tier{size}", nodes_below=size, oversubscription=draw(RATIOS))
            for size in sizes
        ),
    )


@st.composite
def wired_clusters(draw: st.DrawFn) -> Cluster:
    """Up to 7 nodes with domains or boards, PCIe or none, on any fabric; 2 GPUs at least."""
    nodes, gpus, domain = (draw(st.integers(low, high)) for low, high in ((2, 7), (1, 4), (1, 4)))
    board: Link | None = None
    if domain == 1 and gpus % 2 == 0:
        board = draw(st.none() | links())
    return Cluster(
        name="drawn",
        nodes=nodes,
        gpus_per_node=gpus,
        gpu=Gpu(name="drawn GPU", memory_bytes=1, memory_bytes_per_s=1, rates=RATES),
        switch_link=draw(links()),
        nics_per_node=draw(st.integers(1, 5)),
        nic_link=draw(links()),
        nodes_per_domain=domain,
        fabric=draw(fabrics(nodes, domain)),
        board_link=board,
        pcie_link=draw(st.none() | links()),
        gpus_per_pcie_switch=draw(st.integers(1, gpus)),
    )


def whole(cluster: Cluster) -> "Graph[Any]":
    """Every GPU, switch, PCIe switch, NIC and fabric switch of a cluster."""
    graph: Graph[Any] = nx.Graph()

    def add(one: object, other: object, capacity: int | Fraction) -> None:
        if graph.has_edge(one, other):
            capacity += graph.edges[one, other]["capacity"]
        graph.add_edge(one, other, capacity=capacity)

    gpus, nics, fabric = cluster.gpus_per_node, cluster.nics_per_node, cluster.fabric
    pcie_switches = len(range(0, gpus, cluster.gpus_per_pcie_switch))
    for node in range(cluster.nodes):
        domain = node // cluster.nodes_per_domain
        boards = 1 if cluster.board_link is None else 2
        if cluster.board_link is not None:
            add(("hub", domain, 0), ("hub", domain, 1), cluster.board_link.bytes_per_s)
        for gpu in range(gpus):
            me = ("gpu", node * gpus + gpu)
            add(me, ("hub", domain, gpu * boards // gpus), cluster.switch_link.bytes_per_s)
            if cluster.pcie_link is not None:
                switch = ("pcie", node, gpu // cluster.gpus_per_pcie_switch)
                add(me, switch, cluster.pcie_link.bytes_per_s)
        for nic in range(nics):
            card = ("nic", node, nic)
            if cluster.pcie_link is None:
                add(card, ("hub", domain, nic * boards // nics), cluster.nic_link.bytes_per_s)
            else:
                switch = ("pcie", node, nic * pcie_switches // nics)
                add(card, switch, cluster.nic_link.bytes_per_s)
            add(card, plug(fabric, node, nic), cluster.nic_link.bytes_per_s)
    add_tiers(cluster, add)
    for edge in fabric.edges:
        add(edge.source, edge.target, edge.link.bytes_per_s)
    return graph


def plug(fabric: Fabric, node: int, nic: int) -> object:
    """What a NIC is plugged into."""
    if fabric.kind.has_edges:
        return f"node{node}"
    if not fabric.tiers:
        return rail_switch(fabric, 0, 0, nic)
    return rail_switch(fabric, 0, node // fabric.tiers[0].nodes_below, nic)


def rail_switch(fabric: Fabric, tier: int, group: int, rail: int) -> object:
    """The switch of a tier over a group of nodes that a rail passes; the top is one group."""
    if fabric.kind == RAIL_ONLY or (fabric.kind == RAIL_OPTIMIZED and tier == 0):
        return tier, group, rail
    return tier, group, "all rails"


def add_tiers(cluster: Cluster, add: Callable[[object, object, Fraction], None]) -> None:
    """Every switch of every tier, with its way up."""
    fabric = cluster.fabric
    capacity = Fraction(cluster.nic_link.bytes_per_s)  # of a rail; below one node
    below = 1
    for tier_number, tier in enumerate(fabric.tiers):
        capacity *= Fraction(tier.nodes_below, below) / tier.oversubscription
        below = tier.nodes_below
        wider = [each.nodes_below for each in fabric.tiers[tier_number + 1 :]]
        for group in range(-(-cluster.nodes // below)):
            above = group * below // wider[0] if wider else 0
            for rail in range(cluster.nics_per_node):
                add(
                    rail_switch(fabric, tier_number, group, rail),
                    rail_switch(fabric, tier_number + 1, above, rail),
                    capacity,
                )


def part(graph: "Graph[Any]", inside: range, ranks: int) -> int:
    """The minimum cut between the GPUs `inside` and all others."""
    for rank in range(ranks):
        graph.add_edge("in" if rank in inside else "out", ("gpu", rank))  # no limit
    return int(nx.minimum_cut_value(graph, "in", "out"))


@given(st.data())
def test_classes_carry_what_the_whole_graph_carries(data: st.DataObject) -> None:
    cluster = data.draw(wired_clusters())
    first = data.draw(st.integers(1, cluster.ranks - 1))
    assert carried(cluster, first) == part(whole(cluster), range(first), cluster.ranks)


@given(wired_clusters())
def test_no_reported_cut_is_narrower_than_the_narrowest(cluster: Cluster) -> None:
    found = cuts(cluster)
    least = narrowest(found)
    assert bisection(cluster) in found
    for cut in found:
        assert 0 < cut.gpus <= cluster.ranks // 2
        assert cut.bytes_per_s_per_gpu >= least.bytes_per_s_per_gpu
