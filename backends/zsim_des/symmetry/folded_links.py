"""Link classes of a folded cluster, and what each communicator puts on them."""

from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.cluster.fault import Window
from zsim.network.algorithm.activity import GroupShape
from zsim.network.algorithm.ring import RingShape
from zsim.network.link_load import Decision, LinkLoad, LinkLoads, Ways
from zsim.network.way_latency import far_ps, near_ps
from zsim.schedule.operation import CollectiveOperation
from zsim_des.network.communicator_placement import COPY
from zsim_des.network.link_numbering import directions
from zsim_des.network.max_min_fair import Shape
from zsim_des.symmetry.classes import CommunicatorClass, Fold, RankClass, SendKey
from zsim_des.symmetry.fault_state import Trouble

Loads = dict[int, Fraction]
"""Bytes on one link of each class, by its number, for each byte that neighbours exchange."""

States = tuple[Loads, ...]
"""Loads by the state of what is dead."""


@dataclass(frozen=True, slots=True)
class FoldedLinks:
    """`count` links that carry the same: `names` are the hops that they are."""

    names: tuple[str, ...]
    count: Fraction
    bytes_per_s: Fraction


class FoldedLinkTable:
    """Numbers link classes and says what rings and Sends load them with.

    `slow` are link classes with what divides them and when, `neighbours` what each neighbour puts
    on links, one of them its own that holds what it wants.
    """

    def __init__(self, fold: Fold, trouble: Trouble, decision: Decision | None = None) -> None:
        cluster = trouble.cluster
        self.classes: list[FoldedLinks] = []
        self.slow: list[tuple[int, Fraction, Window]] = []
        self._cluster = cluster
        ways = Ways(
            near_ps=near_ps(cluster),
            far_ps=far_ps(cluster),
        )
        self._demands = LinkLoads(cluster=cluster, decision=decision or Decision(), ways=ways)
        self._count = len(trouble.outages.states)
        self._rings: dict[int, list[dict[int, tuple[Fraction, Fraction]]]] = {}
        self._sends: dict[SendKey, States] = {}
        self.neighbours: list[States] = []
        for neighbour in trouble.neighbours:
            own = self._add(("neighbour",), Fraction(1), Fraction(neighbour.bytes_per_s))
            self.neighbours.append(tuple({own: Fraction(1)} for _ in range(self._count)))
        found = directions(cluster)
        none = Fraction(0)
        for each in fold.links:
            names, links = found[each.kind]
            number, multiple = self._add(names, each.count, links.bytes_per_s), links.multiple
            self.slow += [(number, factor, window) for factor, window in each.slow]
            for state, taken in enumerate(each.states):
                for owner in taken.near.keys() | taken.far.keys():
                    near, far = taken.near.get(owner, none), taken.far.get(owner, none)
                    of = self._rings.setdefault(owner, [{} for _ in range(self._count)])
                    of[state][number] = near / multiple, far / multiple
                for sender, load in taken.sends.items():
                    sent = self._sends.setdefault(sender, tuple({} for _ in range(self._count)))
                    sent[state][number] = load / multiple
                for index, load in taken.neighbours.items():
                    self.neighbours[index][state][number] = load

    def _add(self, names: tuple[str, ...], count: Fraction, bytes_per_s: Fraction) -> int:
        self.classes.append(FoldedLinks(names, count, bytes_per_s))
        return len(self.classes) - 1

    def demand(
        self,
        communicator: CommunicatorClass,
        operation: CollectiveOperation,
        ring_bytes: int,
        state: int,
    ) -> LinkLoad | None:
        """Return the demand of a collective that is no plain ring of so many bytes; else None."""
        shape = GroupShape(ranks=communicator.ranks, nodes=communicator.domains)
        found = self._demands.of(operation, ring_bytes, shape)
        if found is None or shape.nodes == 1:
            return found
        return replace(found, latency_ps=found.latency_ps + communicator.climb_ps[state])

    def ring(self, communicator: CommunicatorClass, demand: LinkLoad | None = None) -> States:
        """Return loads of a ring in every communicator of the class, or of `demand`."""
        near, far = (demand.near, demand.far) if demand else (Fraction(1), Fraction(1))
        found: list[Loads] = []
        for parts in self._rings.get(communicator.index, [{}] * self._count):
            loads = {link: one * near + other * far for link, (one, other) in parts.items()}
            found.append({link: load for link, load in sorted(loads.items()) if load > 0})
        return tuple(found)

    def send(self, source: RankClass, group: str, offset: int) -> States:
        """Return loads when every rank of `source` sends a byte per byte of progress."""
        return self._sends.get((source.index, group, offset), ({},) * self._count)

    def copy(self, rank_class: RankClass, *, outward: bool) -> States | None:
        """Return loads when every rank of the class copies a byte out of its memory, or into it.

        None where no links between them are described.
        """
        return self._sends.get((rank_class.index, COPY[outward], 0))

    def lap_ps(self, communicator: CommunicatorClass, state: int) -> int:
        """Picoseconds in which the first byte goes once around the ring."""
        shape = RingShape(ranks=communicator.ranks, nodes=communicator.domains)
        return shape.lap_ps(self._cluster) + communicator.climb_ps[state]

    def send_latency_ps(self, source: RankClass, group: str, offset: int, state: int) -> int:
        """Picoseconds of the way to the peer."""
        peer = source.peers[group, offset]
        way_ps = far_ps(self._cluster) if peer.is_far else near_ps(self._cluster)
        return way_ps + peer.climb_ps[state]


def shapes(loads: States) -> tuple[Shape, ...]:
    """Return loads as the network takes them, by state."""
    return tuple(tuple(each.items()) for each in loads)


def joined(parts: list[tuple[States, int]]) -> tuple[tuple[Shape, ...], int]:
    """One activity that moves all of `parts` (loads and bytes) together: its shapes and bytes.

    Progress is counted in bytes of the largest part.
    """
    size_bytes = max(size for _, size in parts)
    if len(parts) == 1:
        return shapes(parts[0][0]), size_bytes
    found: list[Loads] = []
    for state in range(len(parts[0][0])):
        total: Loads = {}
        for loads, size in parts:
            for link, taken in loads[state].items():
                total[link] = total.get(link, Fraction(0)) + taken * Fraction(size, size_bytes)
        found.append({link: taken for link, taken in sorted(total.items()) if taken})
    return shapes(tuple(found)), size_bytes
