"""Every device and link of a cluster, and the ways that bytes take, one flow after the other.

A second opinion on what the simulation does with arrays and classes: slow, and written from the
rules alone. Devices are tuples that begin with their kind. What is dead is given as sets.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, product
from math import lcm
from typing import Any

import networkx as nx

from zsim.cluster.cluster import Cluster
from zsim.cluster.fabric_kind import RAIL_ONLY, RAIL_OPTIMIZED
from zsim.cluster.links import edges_in_use

Device = tuple[Any, ...]
Way = tuple[Device, ...]
Share = tuple[Way, Fraction]


class NoWayLeftError(Exception):
    """Two GPUs cannot reach each other."""


@dataclass(frozen=True)
class DeadThings:
    """Dead NICs (node, number), links of ranks, uplinks (tier, group, rail or 0), edges."""

    nics: frozenset[tuple[int, int]] = frozenset()
    ranks: frozenset[int] = frozenset()
    uplinks: frozenset[tuple[int, int, int]] = frozenset()
    edges: frozenset[frozenset[str]] = frozenset()


NONE = DeadThings()


class WiredGraph:
    """The ways of one cluster. Ranks fill one node after the other."""

    def __init__(self, cluster: Cluster, dead: DeadThings = NONE) -> None:
        self.cluster = cluster
        self.dead = dead
        self.rail_count = min(cluster.gpus_per_node, cluster.nics_per_node)
        self.width = Fraction(cluster.nics_per_node, self.rail_count)
        self.fabric: nx.Graph[str] = nx.Graph()
        for edge in edges_in_use(cluster):
            self.fabric.add_nodes_from((edge.source, edge.target))
            if frozenset((edge.source, edge.target)) not in dead.edges:
                self.fabric.add_edge(edge.source, edge.target)

    def capacities(self) -> dict[tuple[Device, Device], Fraction]:
        """Bytes per second of every link, by its ends."""
        cluster = self.cluster
        found: dict[tuple[Device, Device], Fraction] = {}

        def add(one: Device, other: Device, bytes_per_s: int | Fraction) -> None:
            found[one, other] = found[other, one] = Fraction(bytes_per_s)

        for rank in range(cluster.ranks):
            add(("gpu", rank), self.hub(rank), cluster.switch_link.bytes_per_s)
            if cluster.pcie_link is not None:
                add(("gpu", rank), self.pcie(rank), cluster.pcie_link.bytes_per_s)
        for node in range(cluster.nodes):
            if cluster.board_link is not None:
                add(("switch", node, 0), ("switch", node, 1), cluster.board_link.bytes_per_s)
            for nic in range(cluster.nics_per_node):
                card = ("nic", node, nic)
                above = self.above(node, nic)
                add(card, self.below(card), cluster.nic_link.bytes_per_s)
                add(card, above[0], cluster.nic_link.bytes_per_s)
                for number, (low, high) in enumerate(pairwise(above)):
                    speed = cluster.uplink_bytes_per_s(number)
                    if self.has_rails(number):
                        speed /= cluster.nics_per_node
                    add(low, high, speed)
        for edge in edges_in_use(cluster):
            add(("end", edge.source), ("end", edge.target), edge.link.bytes_per_s)
        return found

    def hub(self, rank: int) -> Device:
        """The switch, or its half on one board, that a GPU hangs on."""
        node, place = divmod(rank, self.cluster.gpus_per_node)
        half = place * 2 // self.cluster.gpus_per_node if self.cluster.board_link else 0
        return ("switch", node // self.cluster.nodes_per_domain, half)

    def pcie(self, rank: int) -> Device:
        """The PCIe switch that a GPU is on."""
        node, place = divmod(rank, self.cluster.gpus_per_node)
        return ("pcie", node, place // self.cluster.gpus_per_pcie_switch)

    def below(self, nic: Device) -> Device:
        """What a NIC hangs on."""
        cluster, (_, node, number) = self.cluster, nic
        if cluster.pcie_link is not None:
            switches = -(-cluster.gpus_per_node // cluster.gpus_per_pcie_switch)
            return ("pcie", node, number * switches // cluster.nics_per_node)
        half = number * 2 // cluster.nics_per_node if cluster.board_link else 0
        return ("switch", node // cluster.nodes_per_domain, half)

    def has_rails(self, tier: int) -> bool:
        """Whether each rail has its own switch."""
        kind = self.cluster.fabric.kind
        return kind == RAIL_ONLY or (kind == RAIL_OPTIMIZED and tier == 0)

    def above(self, node: int, nic: int) -> list[Device]:
        """The switches above a NIC."""
        if self.cluster.fabric.edges:
            return [("end", f"node{node}")]
        found: list[Device] = []
        for number, tier in enumerate(self.cluster.fabric.tiers):
            rail = nic if self.has_rails(number) else 0
            found.append((tier.name, node // tier.nodes_below, rail))
        return [*found, ("network",)]

    def ways(self, source: int, target: int) -> Iterator[Share]:
        """Ways from one GPU to another, each with its share of the bytes."""
        if self.hub(source)[1] == self.hub(target)[1]:
            yield from self.within(source, target)
        else:
            yield from self.between(source, target)

    def over_hub(self, source: int, target: int) -> Way:
        """Over the switch, and from board to board."""
        hubs = dict.fromkeys((self.hub(source), self.hub(target)))
        return (("gpu", source), *hubs, ("gpu", target))

    def beside(self, switch: Device) -> list[int]:
        """GPUs on a PCIe switch that reach the node's switch."""
        first = switch[1] * self.cluster.gpus_per_node
        ranks = range(first, first + self.cluster.gpus_per_node)
        return [r for r in ranks if self.pcie(r) == switch and r not in self.dead.ranks]

    def within(self, source: int, target: int) -> Iterator[Share]:
        """Over the switch, or past a dead link to it: over PCIe, at last over NICs."""
        if not {source, target} & self.dead.ranks:
            yield self.over_hub(source, target), Fraction(1)
            return
        if self.cluster.pcie_link is None:
            raise NoWayLeftError
        if self.pcie(source) == self.pcie(target):
            yield (("gpu", source), self.pcie(source), ("gpu", target)), Fraction(1)
            return
        doors = [
            [rank] if rank not in self.dead.ranks else self.beside(self.pcie(rank))
            for rank in (source, target)
        ]
        if not all(doors):
            yield from self.hairpin(source, target)
            return
        share = Fraction(1, len(doors[0]) * len(doors[1]))
        for out, into in product(*doors):
            start = () if out == source else (("gpu", source), self.pcie(source))
            end = () if into == target else (self.pcie(target), ("gpu", target))
            yield (*start, *self.over_hub(out, into), *end), share

    def hairpin(self, source: int, target: int) -> Iterator[Share]:
        """Out through the NICs of one GPU and in through those of another of its domain."""
        rails = self.near_rail(source), self.near_rail(target)
        nodes = [rank // self.cluster.gpus_per_node for rank in (source, target)]
        usable = [self.reaches(r, rail) for r, rail in zip((source, target), rails, strict=True)]
        meet = self.cluster.fabric.kind != RAIL_ONLY
        if not all(usable) or not meet or (rails[0] == rails[1] and nodes[0] == nodes[1]):
            raise NoWayLeftError
        yield from self.over_fabric(source, target, rails)

    def between(self, source: int, target: int) -> Iterator[Share]:
        """Out through a NIC, over the fabric, in through a NIC."""
        near, far = self.near_rail(source), self.near_rail(target)
        if self.cluster.fabric.kind in {RAIL_OPTIMIZED, RAIL_ONLY}:
            near = far = self.first_rail(
                far,
                lambda r: (
                    self.reaches(source, r)
                    and self.reaches(target, r)
                    and self.climbs(source, target, r)
                ),
            )
        else:
            near = self.first_rail(near, lambda r: self.reaches(source, r))
            far = self.first_rail(far, lambda r: self.reaches(target, r))
        yield from self.over_fabric(source, target, (near, far))

    def near_rail(self, rank: int) -> int:
        """The bundle of NICs nearest to a GPU."""
        per_node = self.cluster.gpus_per_node
        return rank % per_node * self.rail_count // per_node

    def first_rail(self, first: int, works: Callable[[int], bool]) -> int:
        """The first rail from `first` on that works."""
        for step in range(self.rail_count):
            if works((first + step) % self.rail_count):
                return (first + step) % self.rail_count
        raise NoWayLeftError

    def reaches(self, rank: int, rail: int) -> bool:
        """Whether a GPU reaches NICs of a rail of its node."""
        node = rank // self.cluster.gpus_per_node
        if all((node, nic) in self.dead.nics for nic in self.nics(rail)):
            return False
        hub = self.below(("nic", node, self.nics(rail)[0]))
        if hub[0] == "pcie" and hub == self.pcie(rank):
            return True
        return rank not in self.dead.ranks and (hub[0] != "pcie" or bool(self.beside(hub)))

    def climbs(self, source: int, target: int, rail: int) -> bool:
        """Whether the switches of a rail above both nodes have their uplinks, where needed."""
        nodes = [rank // self.cluster.gpus_per_node for rank in (source, target)]
        for number, tier in enumerate(self.cluster.fabric.tiers):
            groups = {node // tier.nodes_below for node in nodes}
            dead = any((number, group, rail) in self.dead.uplinks for group in groups)
            if self.has_rails(number) and len(groups) > 1 and dead:
                return False
        return True

    def nics(self, rail: int) -> list[int]:
        """NICs of a bundle; as many in each."""
        return list(range(int(rail * self.width), int((rail + 1) * self.width)))

    def over_fabric(self, source: int, target: int, rails: tuple[int, int]) -> Iterator[Share]:
        """All ways through the NICs of two rails."""
        near, far = (rank // self.cluster.gpus_per_node for rank in (source, target))
        cards = [
            [("nic", node, nic) for nic in self.nics(rail)]
            for node, rail in zip((near, far), rails, strict=True)
        ]
        pairs = list(product(*cards))
        if self.cluster.fabric.kind in {RAIL_OPTIMIZED, RAIL_ONLY}:
            pairs = list(zip(*cards, strict=True))
        for out, into in pairs:
            for start, one in self.to_nic(source, out):
                for middle, two in self.above_nics(out, into):
                    for end, three in self.to_nic(target, into):
                        share = one * two * three / len(pairs)
                        yield (*start, *middle, *reversed(end)), share

    def to_nic(self, rank: int, nic: Device) -> Iterator[Share]:
        """From a GPU to a NIC of its node: over its PCIe switch, else over those who are on it."""
        below = self.below(nic)
        if below[0] == "switch":
            yield (("gpu", rank), *dict.fromkeys((self.hub(rank), below)), nic), Fraction(1)
        elif below == self.pcie(rank):
            yield (("gpu", rank), below, nic), Fraction(1)
        else:
            relays = self.beside(below)
            for relay in relays:
                yield (*self.over_hub(rank, relay), below, nic), Fraction(1, len(relays))

    def above_nics(self, out: Device, into: Device) -> Iterator[Share]:
        """From NIC to NIC."""
        if self.cluster.fabric.edges:
            yield from self.over_edges(f"node{out[1]}", f"node{into[1]}")
            return
        up, down = self.above(*out[1:]), self.above(*into[1:])
        meet = next(i for i, (one, other) in enumerate(zip(up, down, strict=True)) if one == other)
        for number in range(meet):
            for _, group, rail in (up[number], down[number]):
                if (number, group, int(rail / self.width)) in self.dead.uplinks:
                    raise NoWayLeftError
        yield (*up[: meet + 1], *reversed(down[:meet])), Fraction(1)

    def over_edges(self, source: str, target: str) -> Iterator[Share]:
        """Every way of the fewest hops; a switch shares evenly between the next ones."""
        if not nx.has_path(self.fabric, source, target):
            raise NoWayLeftError
        ways = list(nx.all_shortest_paths(self.fabric, source, target))
        after: dict[str, set[str]] = {}
        for way in ways:
            for here, there in pairwise(way):
                after.setdefault(here, set()).add(there)
        for way in ways:
            share = Fraction(1)
            for here, _ in pairwise(way):
                share /= len(after[here])
            yield tuple(("end", name) for name in way), share


def ring_edges(cluster: Cluster, members: Sequence[int]) -> dict[tuple[int, int], Fraction]:
    """Pairs of neighbours (source, target) and the share of a ring's bytes that passes there.

    `members` are ranks, ascending. The shares add up to the number of members.
    """
    nodes: dict[int, list[int]] = {}
    for rank in members:
        domain = rank // cluster.gpus_per_node // cluster.nodes_per_domain
        nodes.setdefault(domain, []).append(rank)
    if len(members) == 1:
        return {}
    ring_count = lcm(*(len(ranks) for ranks in nodes.values())) if len(nodes) > 1 else 1
    edges: Counter[tuple[int, int]] = Counter()
    for ring in range(ring_count):
        order: list[int] = []
        for ranks in nodes.values():
            first = (ring + 1) % len(ranks)
            order += ranks[first:] + ranks[:first]
        edges.update(zip(order, order[1:] + order[:1], strict=True))
    return {edge: Fraction(count, ring_count) for edge, count in edges.items()}


def link_bytes(
    graph: WiredGraph, flows: Sequence[tuple[int, int, Fraction]]
) -> dict[tuple[Device, Device], Fraction]:
    """Bytes on every link for flows given as (source, target, bytes)."""
    found: dict[tuple[Device, Device], Fraction] = {}
    for source, target, size in flows:
        for way, share in graph.ways(source, target):
            for hop in pairwise(way):
                found[hop] = found.get(hop, Fraction(0)) + share * size
    return found


def hop_name(one: Device, other: Device) -> str:
    """What the simulation calls a link."""
    if one[0] == other[0] == "switch":
        return "board->board"
    if one[0] == other[0] == "end":
        return f"{one[1]}->{other[1]}"
    named = {("pcie", "nic"): "switch->nic", ("nic", "pcie"): "nic->switch"}
    names = {"end": "network"}
    return named.get(
        (one[0], other[0]), f"{names.get(one[0], one[0])}->{names.get(other[0], other[0])}"
    )
