"""Link classes of a folded cluster, and what each communicator puts on them."""

from dataclasses import dataclass
from fractions import Fraction

from zsim.cluster import Cluster
from zsim.collective.graph import BETWEEN_NODES, WITHIN_NODE, class_graph, latency_ps
from zsim.collective.ring import RingShape
from zsim_des.fair import Shape
from zsim_des.fold import CommunicatorClass, Fold, RankClass

Loads = dict[int, Fraction]
"""Bytes on one link of each class, by its number, for each byte that neighbours exchange."""

TO_SWITCH, FROM_SWITCH = "gpu->switch", "switch->gpu"
OUT = ("switch->nic", "nic->network")
IN = ("network->nic", "nic->switch")
NAMES = (TO_SWITCH, FROM_SWITCH, *OUT, *IN)


@dataclass(frozen=True, slots=True)
class LinkClass:
    """`count` links that carry the same: `names` are the hops of the graph that they are."""

    names: tuple[str, ...]
    count: Fraction
    bytes_per_s: int


class Links:
    """Numbers link classes and says what rings and Sends load them with.

    A GPU's two directions and a NIC's two directions are a link class each per rank class and NIC
    class. The two hops of a NIC carry the same bytes at the same rate, so they limit as one.
    """

    def __init__(self, fold: Fold, cluster: Cluster) -> None:
        self.classes: list[LinkClass] = []
        self._fold = fold
        self._graph = class_graph(cluster)
        switch, nic = cluster.switch_link.bytes_per_s, cluster.nic_link.bytes_per_s
        self._up = [self._add((TO_SWITCH,), each.count, switch) for each in fold.ranks]
        self._down = [self._add((FROM_SWITCH,), each.count, switch) for each in fold.ranks]
        self._out = [self._add(OUT, each.count, nic) for each in fold.nics]
        self._in = [self._add(IN, each.count, nic) for each in fold.nics]

    def _add(self, names: tuple[str, ...], count: int | Fraction, bytes_per_s: int) -> int:
        self.classes.append(LinkClass(names, Fraction(count), bytes_per_s))
        return len(self.classes) - 1

    def ring(self, communicator: CommunicatorClass) -> Loads:
        """Loads of a ring in every communicator of the class."""
        loads: Loads = {}
        for index in communicator.classes:
            loads[self._up[index]] = loads[self._down[index]] = Fraction(1)
        if communicator.nodes == 1:
            return loads
        group = communicator.group
        for number, nic in enumerate(self._fold.nics):
            share = sum(
                (
                    ranks * self._fold.ranks[index].shares[group]
                    for index, ranks in nic.ranks.items()
                    if index in communicator.classes
                ),
                Fraction(0),
            )
            if share:
                loads[self._out[number]] = loads[self._in[number]] = share
        return loads

    def send(self, source: RankClass, group: str, offset: int) -> Loads:
        """Loads when every rank of `source` sends one byte per byte of progress to its peer."""
        peer = source.peers[group, offset]
        loads: Loads = {
            self._up[source.index]: Fraction(1),
            self._down[peer.rank_class]: Fraction(1),
        }
        if peer.is_far:
            for number, nic in enumerate(self._fold.nics):
                if ranks := nic.ranks.get(source.index):
                    loads[self._out[number]] = ranks
                if ranks := nic.ranks.get(peer.rank_class):
                    loads[self._in[number]] = ranks
        return loads

    def lap_ps(self, communicator: CommunicatorClass) -> int:
        """Picoseconds in which the first byte goes once around the ring."""
        return RingShape(ranks=communicator.ranks, nodes=communicator.nodes).lap_ps(self._graph)

    def send_latency_ps(self, source: RankClass, group: str, offset: int) -> int:
        """Picoseconds of the way to the peer."""
        is_far = source.peers[group, offset].is_far
        return latency_ps(self._graph, BETWEEN_NODES if is_far else WITHIN_NODE)


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
