"""Link classes of a folded cluster, and what each communicator puts on them."""

from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.collective.activity import Shape as CommunicatorShape
from zsim.collective.demand import Decision, Demand, Demands, Ringed, Ways
from zsim.collective.graph import BETWEEN_NODES, WITHIN_NODE, class_graph, latency_ps
from zsim.collective.ring import RingShape
from zsim.fault import Window
from zsim_des.fair import Shape
from zsim_des.fold import CommunicatorClass, Fold, RankClass
from zsim_des.trouble import Trouble

Loads = dict[int, Fraction]
"""Bytes on one link of each class, by its number, for each byte that neighbours exchange."""

TO_SWITCH, FROM_SWITCH = "gpu->switch", "switch->gpu"
TO_PCIE, FROM_PCIE = "gpu->pcie", "pcie->gpu"


@dataclass(frozen=True, slots=True)
class LinkClass:
    """`count` links that carry the same: `names` are the hops of the graph that they are."""

    names: tuple[str, ...]
    count: Fraction
    bytes_per_s: Fraction


class Links:
    """Numbers link classes and says what rings and Sends load them with.

    A GPU's two directions are a link class each per rank class, and the links between nodes are as
    the fold has them. The two hops of a NIC carry the same bytes at the same rate, so they limit as
    one. Where GPUs reach their NICs through PCIe, what leaves the domain takes that way; elsewhere
    the NICs hang on the switch. `slow` are link classes with what divides them and when,
    `neighbours` what each neighbour puts on links, one of them its own that holds what it wants.
    """

    def __init__(self, fold: Fold, trouble: Trouble, decision: Decision | None = None) -> None:
        cluster = trouble.cluster
        self.classes: list[LinkClass] = []
        self.slow: list[tuple[int, Fraction, Window]] = []
        self.neighbours: list[Loads] = []
        self._fold = fold
        self._graph = class_graph(cluster)
        ways = Ways(
            near_ps=latency_ps(self._graph, WITHIN_NODE),
            far_ps=latency_ps(self._graph, BETWEEN_NODES),
        )
        self._demands = Demands(cluster=cluster, decision=decision or Decision(), ways=ways)
        switch = cluster.switch_link.bytes_per_s
        self._up = [self._add((TO_SWITCH,), each.count, switch) for each in fold.ranks]
        self._down = [self._add((FROM_SWITCH,), each.count, switch) for each in fold.ranks]
        for index, ranks in enumerate(fold.ranks):
            for factor, window in trouble.switch_links(ranks.rank):
                self.slow.append((self._up[index], factor, window))
                self.slow.append((self._down[index], factor, window))
        for neighbour in trouble.neighbours:
            own = self._add(("neighbour",), 1, neighbour.bytes_per_s)
            self.neighbours.append({own: Fraction(1)})
        self._pcie: list[tuple[int, int]] = []
        if cluster.pcie_link is not None:
            speed = cluster.pcie_link.bytes_per_s
            self._pcie = [
                (
                    self._add((TO_PCIE,), each.count, speed),
                    self._add((FROM_PCIE,), each.count, speed),
                )
                for each in fold.ranks
            ]
        self._rings: dict[int, Loads] = {}
        self._sends: dict[tuple[int, str, int], Loads] = {}
        for each in fold.links:
            number = self._add(each.names, each.count, each.bytes_per_s)
            for communicator, load in each.rings.items():
                self._rings.setdefault(communicator, {})[number] = load
            for sender, load in each.sends.items():
                self._sends.setdefault(sender, {})[number] = load
            for neighbour_number, load in each.neighbours.items():
                self.neighbours[neighbour_number][number] = load
            self.slow += [(number, factor, window) for factor, window in each.slow]

    def _add(
        self, names: tuple[str, ...], count: int | Fraction, bytes_per_s: int | Fraction
    ) -> int:
        self.classes.append(LinkClass(names, Fraction(count), Fraction(bytes_per_s)))
        return len(self.classes) - 1

    def demand(
        self, communicator: CommunicatorClass, operation: Ringed, ring_bytes: int
    ) -> Demand | None:
        """What a collective asks for that is not the plain ring of so many bytes; else None."""
        shape = CommunicatorShape(ranks=communicator.ranks, nodes=communicator.domains)
        found = self._demands.of(operation, ring_bytes, shape)
        if found is None or shape.nodes == 1:
            return found
        return replace(found, latency_ps=found.latency_ps + communicator.climb_ps)

    def ring(self, communicator: CommunicatorClass, demand: Demand | None = None) -> Loads:
        """Loads of a ring in every communicator of the class, or of what asks for `demand`."""
        near, far = (demand.near, demand.far) if demand else (Fraction(1), Fraction(1))
        loads: Loads = {}
        for index in communicator.classes:
            share = self._fold.ranks[index].shares[communicator.group] if self._pcie else 0
            if share:
                to_pcie, from_pcie = self._pcie[index]
                loads[to_pcie] = loads[from_pcie] = share * far
            if share < 1:
                inside = max(Fraction(0), near - share * far)
                loads[self._up[index]] = loads[self._down[index]] = inside
        between = self._rings.get(communicator.index, {})
        return loads | {link: load * far for link, load in between.items()}

    def send(self, source: RankClass, group: str, offset: int) -> Loads:
        """Loads when every rank of `source` sends one byte per byte of progress to its peer."""
        peer = source.peers[group, offset]
        up, down = self._up[source.index], self._down[peer.rank_class]
        if peer.is_far and self._pcie:
            up, down = self._pcie[source.index][0], self._pcie[peer.rank_class][1]
        far = self._sends.get((source.index, group, offset), {})
        return {up: Fraction(1), down: Fraction(1)} | far

    def lap_ps(self, communicator: CommunicatorClass) -> int:
        """Picoseconds in which the first byte goes once around the ring."""
        shape = RingShape(ranks=communicator.ranks, nodes=communicator.domains)
        return shape.lap_ps(self._graph) + communicator.climb_ps

    def send_latency_ps(self, source: RankClass, group: str, offset: int) -> int:
        """Picoseconds of the way to the peer."""
        peer = source.peers[group, offset]
        way = BETWEEN_NODES if peer.is_far else WITHIN_NODE
        return latency_ps(self._graph, way) + peer.climb_ps


def joined(parts: list[tuple[Loads, int]]) -> tuple[Shape, int]:
    """One activity that moves all of `parts` (loads and bytes) together: its shape and bytes.

    Progress is counted in bytes of the largest part.
    """
    size_bytes = max(size for _, size in parts)
    if len(parts) == 1:
        return tuple(parts[0][0].items()), size_bytes
    total: Loads = {}
    for loads, size in parts:
        for link, taken in loads.items():
            total[link] = total.get(link, Fraction(0)) + taken * Fraction(size, size_bytes)
    return tuple(sorted((link, taken) for link, taken in total.items() if taken)), size_bytes
