"""The links of a cluster as a graph: of classes with multiplicities, or every link on request.

GPUs of an NVSwitch domain meet on its switch, NICs hang on the switch, nodes meet on a fabric of
switches with tiers, whose top limits nothing. Every link is two edges, one per direction. Each GPU
sends to other nodes through the NIC nearest to it: GPU i of g uses NIC floor(i * k / g) of k, or
with more NICs than GPUs its share of k / g of them. On rails it takes the NIC of the rail that is
the target's. Switches of a tier are one for each group of nodes (and rail, where they are apart),
with all their uplinks as one link. PCIe and fabrics given by their edges are not in the graph.
"""

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from zsim.cluster import Cluster, FabricKind

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
    switch, nic_link = cluster.switch_link.bytes_per_s, cluster.nic_link.bytes_per_s
    for node in range(cluster.nodes):
        hub = _hub(cluster, node)
        for index in range(cluster.gpus_per_node):
            _connect(graph, Device(GPU, node, index), hub, switch)
        for index in range(cluster.nics_per_node):
            nic = Device(NIC, node, index)
            tiers = _tiers(cluster, nic)
            _connect(graph, nic, hub, nic_link)
            _connect(graph, nic, tiers[0], nic_link)
            for number, (low, high) in enumerate(pairwise(tiers)):
                speed = cluster.uplink_bytes_per_s(number)
                if _has_rails(cluster, number):
                    speed /= cluster.nics_per_node
                _connect(graph, low, high, speed)
    return graph


def _hub(cluster: Cluster, node: int) -> Device:
    """The switch of the domain of a node."""
    return Device(SWITCH, node // cluster.nodes_per_domain)


def _has_rails(cluster: Cluster, tier: int) -> bool:
    kind = cluster.fabric.kind
    return kind is FabricKind.RAIL_ONLY or (kind is FabricKind.RAIL_OPTIMIZED and tier == 0)


def _tiers(cluster: Cluster, nic: Device) -> list[Device]:
    """The switches above a NIC, from its leaf to the top."""
    found: list[Device] = []
    for number, tier in enumerate(cluster.fabric.tiers):
        rail = nic.number if _has_rails(cluster, number) else 0
        found.append(Device(tier.name, nic.node // tier.nodes_below, rail))
    return [*found, THE_NETWORK]


def _connect(
    graph: "Graph[Device]", one: Device, other: Device, bytes_per_s: int | Fraction
) -> None:
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
    hub, far_hub = _hub(cluster, source.node), _hub(cluster, target.node)
    if hub == far_hub:
        yield (source, hub, target), Fraction(1)
        return
    on_rails = cluster.fabric.kind in {FabricKind.RAIL_OPTIMIZED, FabricKind.RAIL_ONLY}
    for far_nic, far_share in nearest_nics(cluster, target):
        near = nearest_nics(cluster, source)
        if on_rails:
            near = [(far_nic._replace(node=source.node), Fraction(1))]
        for nic, share in near:
            up, down = _tiers(cluster, nic), _tiers(cluster, far_nic)
            meet = next(index for index, switch in enumerate(up) if switch == down[index])
            above = (*up[: meet + 1], *reversed(down[:meet]))
            yield (source, hub, nic, *above, far_nic, far_hub, target), share * far_share
