"""Cuts between some GPUs of a cluster and the others, and the narrowest of them.

A cut is the maximum bandwidth from the first GPUs, in the order of ranks, to all others (by
max-flow and min-cut, the bandwidth of the links between them). Groups of nodes in the same
position relative to the cut are equivalent and become one vertex with the sum of their links.
This keeps the maximum flow (a flow averaged over equivalent vertices is a flow), and any cluster
has only about a hundred vertices. An explicit fabric has a vertex for each node and switch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from zsim.cluster.cluster import Cluster
from zsim.cluster.links import edges_in_use

Vertex = tuple[Any, ...]
SOURCE: Vertex = ("first GPUs",)
SINK: Vertex = ("other GPUs",)
TOP: Vertex = ("top",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The links between `gpus` GPUs and all others; `gpus` is at most half of all GPUs.

    Attributes:
        level: the group that is cut off: "gpu", "board", "node", "domain", a tier, "nodes" of an
            explicit fabric, or "half".
        where: text about the position of the cut.
        bytes_per_s: bandwidth of all links of the cut in one direction.
    """

    level: str
    where: str
    gpus: int
    bytes_per_s: int

    @property
    def bytes_per_s_per_gpu(self) -> Fraction:
        """Bandwidth of each GPU of the smaller side when all send across the cut."""
        return Fraction(self.bytes_per_s, self.gpus)


def cuts(cluster: Cluster) -> tuple[Cut, ...]:
    """Return a cut around one group of each kind, from a GPU up, and the bisection last.

    The result is empty for a cluster of one GPU.
    """
    per_node, ranks = cluster.gpus_per_node, cluster.ranks
    groups = {1: ("gpu", "out of a GPU")}
    if cluster.board_link is not None:
        half = per_node // 2
        groups[half] = "board", f"out of a board of {half} GPUs"
    groups[per_node] = "node", f"out of a node of {per_node} GPUs"
    domain = cluster.nodes_per_domain * per_node
    groups.setdefault(domain, ("domain", f"out of an NVSwitch domain of {domain} GPUs"))
    for tier in cluster.fabric.tiers:
        below = tier.nodes_below
        where = f"out of the {below} nodes below a {tier.name}"
        groups.setdefault(below * per_node, (tier.name, where))
    found = [
        Cut(
            level=level,
            where=where,
            gpus=min(gpus, ranks - gpus),
            bytes_per_s=carried(cluster, gpus),
        )
        for gpus, (level, where) in sorted(groups.items())
        if gpus < ranks
    ]
    if cluster.fabric.edges and cluster.nodes > 1:
        found.append(narrowest(tuple(_explicit_cuts(cluster))))
    return (*found, bisection(cluster)) if ranks > 1 else ()


def bisection(cluster: Cluster) -> Cut:
    """Return the cut between the first half of the nodes (on one node, GPUs) and the rest."""
    whole = cluster.gpus_per_node if cluster.nodes > 1 else 1
    gpus = cluster.ranks // whole // 2 * whole
    sent = carried(cluster, gpus)
    return Cut(level="half", where="between two halves", gpus=gpus, bytes_per_s=sent)


def narrowest(found: tuple[Cut, ...]) -> Cut:
    """Return the cut of `found` with the least bandwidth per GPU; the first of equal ones."""
    return min(found, key=lambda cut: cut.bytes_per_s_per_gpu)


def carried(cluster: Cluster, gpus: int) -> int:
    """Return the bytes per second from the first `gpus` GPUs to the others, at least one."""
    import networkx as nx

    graph = _Parted(cluster, gpus).graph
    return int(nx.minimum_cut_value(graph, SOURCE, SINK))


class _Parted:
    """The graph of equivalent groups of a cluster, cut after its first `gpus` GPUs.

    A group of nodes has a `key`: for it and each larger group around it, the position of its GPUs
    (-1 before the cut, 1 after it, 0 on both sides), and whether it has fewer nodes than others.
    """

    def __init__(self, cluster: Cluster, gpus: int) -> None:
        import networkx as nx

        self.graph: nx.Graph[Vertex] = nx.Graph()
        self._cluster = cluster
        self._gpus = gpus
        self._explicit = bool(cluster.fabric.edges)
        sizes = {tier.nodes_below for tier in cluster.fabric.tiers}
        self._sizes = sorted(sizes | {1, cluster.nodes_per_domain})
        self._rails = cluster.nics_per_node if cluster.fabric.kind.on_rails else 1
        alike: dict[Vertex, tuple[int, int]] = {}
        for node in range(cluster.nodes):
            key = self._key(node, 1)
            first, count = alike.get(key, (node, 0))
            alike[key] = first, count + 1
        for node, count in alike.values():
            self._add_nodes(node, count)
        for number in range(len(cluster.fabric.tiers)):
            self._add_tier(number)
        for edge in edges_in_use(cluster):
            self._add(("end", edge.source), ("end", edge.target), edge.link.bytes_per_s)

    def _key(self, node: int, size: int) -> Vertex:
        """Return the class of the group of `size` nodes that contains `node`."""
        if self._explicit:
            return (size, node // size)
        nodes, per_node = self._cluster.nodes, self._cluster.gpus_per_node
        key: list[tuple[int, bool]] = []
        for each in self._sizes:
            if each < size:
                continue
            low = node // each * each
            high = min(low + each, nodes)
            side = (low * per_node >= self._gpus) - (high * per_node <= self._gpus)
            key.append((side, high - low < each))
        return (size, *key)

    def _add_nodes(self, node: int, count: int) -> None:
        """Add `count` nodes like `node`: GPUs, NVSwitch, PCIe switches, and NICs."""
        cluster = self._cluster
        key = self._key(node, 1)
        domain = self._key(node, cluster.nodes_per_domain)
        hubs: list[Vertex] = [("switch", domain)]
        if cluster.board_link is not None:
            hubs = [("switch", domain, board) for board in range(2)]
            self._add(hubs[0], hubs[1], cluster.board_link.bytes_per_s * count)
        gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
        for gpu in range(gpus):
            end = SOURCE if node * gpus + gpu < self._gpus else SINK
            hub = hubs[gpu * len(hubs) // gpus]
            self._add(end, hub, cluster.switch_link.bytes_per_s * count)
            if cluster.pcie_link is not None:
                switch = ("pcie", key, gpu // cluster.gpus_per_pcie_switch)
                self._add(end, switch, cluster.pcie_link.bytes_per_s * count)
        for nic in range(nics):
            below = hubs[nic * len(hubs) // nics]
            if cluster.pcie_link is not None:
                below = ("pcie", key, nic * cluster.pcie_switches // nics)
            self._add(below, self._above_nic(node, nic), cluster.nic_link.bytes_per_s * count)

    def _above_nic(self, node: int, nic: int) -> Vertex:
        """Return the vertex above the NIC at index `nic` of `node`."""
        if self._explicit:
            return ("end", f"node{node}")
        return self._switch(0, node, nic % self._rails)

    def _switch(self, tier: int, node: int, rail: int) -> Vertex:
        """Return the switch of a tier above `node`, on a rail; the top after the last tier."""
        fabric = self._cluster.fabric
        rail = rail if fabric.kind.has_rails(tier) else 0
        if tier == len(fabric.tiers):
            return (*TOP, rail)
        return (tier, self._key(node, fabric.tiers[tier].nodes_below), rail)

    def _add_tier(self, number: int) -> None:
        """Add the uplinks of all switches of a tier."""
        tier = self._cluster.fabric.tiers[number]
        each = self._cluster.uplink_bytes_per_s(number) / self._rails
        for node in range(0, self._cluster.nodes, tier.nodes_below):
            for rail in range(self._rails):
                below, above = (
                    self._switch(number, node, rail),
                    self._switch(number + 1, node, rail),
                )
                self._add(below, above, each)

    def _add(self, one: Vertex, other: Vertex, bytes_per_s: int | Fraction) -> None:
        """Add the bandwidth of a link between two vertices to that of existing links."""
        if self.graph.has_edge(one, other):
            bytes_per_s += self.graph.edges[one, other]["capacity"]
        self.graph.add_edge(one, other, capacity=bytes_per_s)


def _explicit_cuts(cluster: Cluster) -> Iterator[Cut]:
    """Yield the narrowest cuts between nodes of an explicit fabric (Gomory and Hu 1961)."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    for edge in edges_in_use(cluster):
        graph.add_edge(edge.source, edge.target, capacity=edge.link.bytes_per_s)
    nodes = {f"node{node}" for node in range(cluster.nodes)}
    tree = nx.gomory_hu_tree(graph)
    for one, other, data in tree.edges(data=True):
        rest = tree.copy()
        rest.remove_edge(one, other)
        sides = [nodes & nx.node_connected_component(rest, end) for end in (one, other)]
        few = min(sides, key=lambda side: (len(side), min(side, default="")))
        if few and len(few) < len(nodes):
            names = sorted(few, key=lambda name: int(name.removeprefix("node")))
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            yield Cut(
                level="nodes",
                where=f"between {shown} ({len(few)} of {len(nodes)} nodes) and the others",
                gpus=len(few) * cluster.gpus_per_node,
                bytes_per_s=data["weight"],
            )
