"""The links of a cluster as a graph of classes with multiplicities, for what a way takes.

GPUs of an NVSwitch domain meet on its switch, NICs hang on the switch, nodes meet on a network.
Every link is two edges, one per direction. PCIe, boards and what the network is made of are not in
the graph: a backend that simulates them says what they add.
"""

from itertools import pairwise

import networkx as nx

from zsim.cluster.cluster import Cluster

GPU, SWITCH, NIC, NETWORK = "gpu", "switch", "nic", "network"
WITHIN_NODE = (GPU, SWITCH, GPU)
"""The way from one GPU to another of its node."""
BETWEEN_NODES = (GPU, SWITCH, NIC, NETWORK, NIC, SWITCH, GPU)
"""The way from a GPU to one of another node."""

Graph = nx.DiGraph


def class_graph(cluster: Cluster) -> "Graph[str]":
    """One node per class of equal devices, one edge per class of links.

    Edges have `bytes_per_s` and `latency_ps` of one link, and `count`, the links of the class. The
    latency of a NIC is that of its way to the network; its way to the switch adds none.
    """
    graph: Graph[str] = nx.DiGraph()
    graph.add_node(GPU, count=cluster.ranks)
    graph.add_node(SWITCH, count=cluster.nodes)
    graph.add_node(NIC, count=cluster.nodes * cluster.nics_per_node)
    graph.add_node(NETWORK, count=1)
    switch, nic = cluster.switch_link, cluster.nic_link
    for source, target, link, latency_ps in (
        (GPU, SWITCH, switch, switch.latency_ps),
        (SWITCH, NIC, nic, 0),
        (NIC, NETWORK, nic, nic.latency_ps),
    ):
        count = graph.nodes[NIC if NIC in {source, target} else GPU]["count"]
        for edge in ((source, target), (target, source)):
            graph.add_edge(*edge, bytes_per_s=link.bytes_per_s, latency_ps=latency_ps, count=count)
    return graph


def latency_ps(graph: "Graph[str]", way: tuple[str, ...]) -> int:
    """Picoseconds that the first byte takes over all hops of `way`."""
    return sum(graph.edges[hop]["latency_ps"] for hop in pairwise(way))
