"""The links of a cluster as a graph: of classes with multiplicities, or every link on request.

GPUs of a node meet on its switch, NICs hang on the switch, nodes meet on one network that itself
limits nothing. Every link is two edges, one per direction. Each GPU sends to other nodes through
the NIC nearest to it: GPU i of g uses NIC floor(i * k / g) of k, or with more NICs than GPUs its
share of k / g of them.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from zsim.cluster import Cluster

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


class Device(NamedTuple):
    """One device of the full graph: its class, its node, and its number there."""

    kind: str
    node: int = 0
    number: int = 0


THE_NETWORK = Device(NETWORK)


def full_graph(cluster: Cluster) -> "Graph[Device]":
    """Every GPU, switch and NIC, and both directions of every link. Costs as much as there are."""
    graph: Graph[Device] = nx.DiGraph()
    for node in range(cluster.nodes):
        hub = Device(SWITCH, node)
        for index in range(cluster.gpus_per_node):
            _connect(graph, Device(GPU, node, index), hub, cluster.switch_link.bytes_per_s)
        for index in range(cluster.nics_per_node):
            nic = Device(NIC, node, index)
            _connect(graph, nic, hub, cluster.nic_link.bytes_per_s)
            _connect(graph, nic, THE_NETWORK, cluster.nic_link.bytes_per_s)
    return graph


def _connect(graph: "Graph[Device]", one: Device, other: Device, bytes_per_s: int) -> None:
    graph.add_edge(one, other, bytes_per_s=bytes_per_s)
    graph.add_edge(other, one, bytes_per_s=bytes_per_s)


def gpu_of(cluster: Cluster, rank: int) -> Device:
    """The GPU that runs `rank`: ranks fill one node after the other."""
    return Device(GPU, *divmod(rank, cluster.gpus_per_node))


def nearest_nics(cluster: Cluster, gpu: Device) -> list[tuple[Device, Fraction]]:
    """NICs that traffic of `gpu` takes, each with its share."""
    gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
    bundle_count = min(gpus, nics)
    bundle = gpu.number * bundle_count // gpus
    width = Fraction(nics, bundle_count)
    low, high = bundle * width, (bundle + 1) * width
    found: list[tuple[Device, Fraction]] = []
    for index in range(int(low), -int(-high // 1)):
        part = min(high, Fraction(index + 1)) - max(low, Fraction(index))
        found.append((Device(NIC, gpu.node, index), part / width))
    return found


def ways(
    cluster: Cluster, source: Device, target: Device
) -> Iterator[tuple[tuple[Device, ...], Fraction]]:
    """Ways from one GPU to another, each with the share of the bytes that takes it."""
    hub, far_hub = Device(SWITCH, source.node), Device(SWITCH, target.node)
    if hub == far_hub:
        yield (source, hub, target), Fraction(1)
        return
    for nic, share in nearest_nics(cluster, source):
        for far_nic, far_share in nearest_nics(cluster, target):
            yield (source, hub, nic, THE_NETWORK, far_nic, far_hub, target), share * far_share
