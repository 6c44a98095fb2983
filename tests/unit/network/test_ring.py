"""Rings on a cluster: latency by laps, bytes on every link of the full graph."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wired_graph import WiredGraph, link_bytes, ring_edges

from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.network.algorithm.ring import RingShape
from zsim.network.link_graph import BETWEEN_NODES, WITHIN_NODE, class_graph, latency_ps

GPU = Gpu(name="any", memory_bytes=1, memory_bytes_per_s=1, rates=())


def cluster(nodes: int, gpus: int, nics: int) -> Cluster:
    return Cluster(
        name="test",
        nodes=nodes,
        gpus_per_node=gpus,
        gpu=GPU,
        switch_link=Link(bytes_per_s=300, latency_ps=5),
        nics_per_node=nics,
        nic_link=Link(bytes_per_s=12, latency_ps=100),
    )


small_clusters = st.builds(cluster, st.integers(1, 4), st.integers(1, 6), st.integers(1, 6))


@given(small_clusters)
def test_the_class_graph_counts_the_links_of_the_full_graph(given: Cluster) -> None:
    classes, full = class_graph(given), WiredGraph(given).capacities()
    counted = Counter((source[0], target[0]) for source, target in full)
    assert counted == {edge: classes.edges[edge]["count"] for edge in classes.edges}
    for (source, target), bytes_per_s in full.items():
        assert bytes_per_s == classes.edges[source[0], target[0]]["bytes_per_s"]


def test_the_way_between_nodes_crosses_two_nics() -> None:
    graph = class_graph(cluster(2, 2, 1))
    assert latency_ps(graph, WITHIN_NODE) == 5 + 5
    assert latency_ps(graph, BETWEEN_NODES) == 5 + 100 + 100 + 5


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected_ps"),
    [
        (1, 1, 0),
        (4, 1, 3 * 10),  # three edges inside the node
        (4, 2, 1 * 10 + 2 * 210),  # of two edges inside, the chunk leaves one out
        (3, 3, 2 * 210),  # no edge inside: of three outside, it leaves one out
    ],
)
def test_a_lap_passes_every_edge_but_the_fastest(ranks: int, nodes: int, expected_ps: int) -> None:
    assert RingShape(ranks=ranks, nodes=nodes).lap_ps(class_graph(cluster(4, 4, 1))) == expected_ps


@given(small_clusters, st.data())
def test_every_member_sends_and_receives_once(given: Cluster, data: st.DataObject) -> None:
    members = sorted(data.draw(st.sets(st.integers(0, given.ranks - 1))) | {0})
    if len(members) == 1:
        return
    edges = ring_edges(given, members)
    for rank in members:
        assert sum(share for (source, _), share in edges.items() if source == rank) == 1
        assert sum(share for (_, target), share in edges.items() if target == rank) == 1
    # One edge enters and one leaves every node.
    per_node = given.gpus_per_node
    nodes = {rank // per_node for rank in members}
    crossing = sum(
        share for (one, two), share in edges.items() if one // per_node != two // per_node
    )
    assert crossing == (len(nodes) if len(nodes) > 1 else 0)


def test_a_ring_over_whole_nodes_uses_every_nic_equally() -> None:
    """One ring edge leaves each node of 4 GPUs with 2 NICs: half of it through each of them."""
    given = cluster(2, 4, 2)
    edges = ring_edges(given, range(8))
    flows = [(one, two, share) for (one, two), share in edges.items()]
    carried = link_bytes(WiredGraph(given), flows)
    for node in (0, 1):
        for number in (0, 1):
            nic = ("nic", node, number)
            assert carried[nic, ("network",)] == Fraction(1, 2)
            assert carried[("network",), nic] == Fraction(1, 2)
        for number in range(4):
            assert carried[("gpu", 4 * node + number), ("switch", node, 0)] == 1
