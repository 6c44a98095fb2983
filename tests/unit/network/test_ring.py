"""Rings on a cluster: latency by laps, bytes on every link of the full graph."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_graph import WiredGraph, hop_name, link_bytes, ring_edges

from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.cluster.links import link_classes
from zsim.network.algorithm.path_latency import far_ps, near_ps
from zsim.network.algorithm.ring import RingShape

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
def test_link_classes_count_the_links_of_the_full_graph(given: Cluster) -> None:
    full = WiredGraph(given).capacities()
    counted = Counter(hop_name(*ends) for ends in full)
    found = {
        hop: (each.count, each.bytes_per_s)
        for each in link_classes(given)
        for hops in each.hops
        for hop in hops
    }
    assert counted == {hop: count for hop, (count, _) in found.items()}
    for ends, bytes_per_s in full.items():
        assert bytes_per_s == found[hop_name(*ends)][1]


def test_the_way_between_nodes_crosses_two_nics() -> None:
    two = cluster(2, 2, 1)
    assert near_ps(two) == 5 + 5
    assert far_ps(two) == 5 + 100 + 100 + 5


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
    assert RingShape(ranks=ranks, nodes=nodes).lap_ps(cluster(4, 4, 1)) == expected_ps


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
