"""Link classes of a folded cluster, and the loads of each communicator on them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.cluster.fault import Window
from zsim.cluster.host_links import (
    CPU_CORES,
    DRIVES_BUSY,
    IO_REQUESTS,
    HostFlow,
    Level,
    load_of,
    need_cpu,
    need_drives,
    path,
)
from zsim.cluster.links import FROM_SWITCH, TO_SWITCH, LinkClass
from zsim.compute.drive import drive_bytes_per_s
from zsim.network.algorithm.activity import GroupShape
from zsim.network.algorithm.path_latency import far_ps, near_ps
from zsim.network.algorithm.ring import RingShape
from zsim.network.link_load import Decision, LinkLoad, LinkLoads, PathLatency
from zsim.schedule.operation import CollectiveOperation
from zsim_des.network.carried import Carried
from zsim_des.network.link_numbering import directions
from zsim_des.network.max_min_fair import Shape
from zsim_des.symmetry.classes import CommunicatorClass, Fold, RankClass, SendKey
from zsim_des.symmetry.fault_state import Disturbances

Loads = dict[int, Fraction]
"""Bytes on one link of each class, by its number, per byte that ring neighbours exchange."""

States = tuple[Loads, ...]
"""Loads by state (the set of dead links)."""


@dataclass(frozen=True, slots=True)
class FoldedLinks:
    """`count` links with equal loads; `names` are the names of their hops."""

    names: tuple[str, ...]
    count: Fraction
    bytes_per_s: Fraction
    carries_bytes: bool = True


class FoldedLinkTable:
    """Numbers link classes and returns the loads of rings and Sends on them.

    `slow` lists link classes with a divisor of their bandwidth and its window. `neighbours` has the
    loads of each neighbour, which include a private link that limits it to its demand.
    """

    def __init__(
        self, fold: Fold, disturbances: Disturbances, decision: Decision | None = None
    ) -> None:
        cluster = disturbances.cluster
        self.classes: list[FoldedLinks] = []
        self.slow: list[tuple[int, Fraction, Window]] = []
        self._cluster = cluster
        latency = PathLatency(
            near_ps=near_ps(cluster),
            far_ps=far_ps(cluster),
        )
        self._demands = LinkLoads(cluster=cluster, decision=decision or Decision(), latency=latency)
        self._count = len(disturbances.outages.states)
        self._rings: dict[int, list[dict[int, tuple[Fraction, Fraction]]]] = {}
        self._sends: dict[SendKey, States] = {}
        self.neighbours: list[States] = []
        for neighbour in disturbances.neighbours:
            speed = Fraction(neighbour.bytes_per_s)
            own = self._add(FoldedLinks(("neighbour",), Fraction(1), speed))
            self.neighbours.append(tuple({own: Fraction(1)} for _ in range(self._count)))
        found = directions(cluster)
        none = Fraction(0)
        self._between: dict[int | SendKey, int] = {}
        for each in fold.links:
            names, links = found[each.kind]
            number, multiple = self._of(names, each.count, links), links.multiple
            self.slow += [(number, factor, window) for factor, window in each.slow]
            is_own = not cluster.has_switch and bool(set(names) & {TO_SWITCH, FROM_SWITCH})
            for state, taken in enumerate(each.states):
                if is_own:
                    self._add_between(taken.near, taken.sends, state)
                for owner in taken.near.keys() | taken.far.keys():
                    near, far = taken.near.get(owner, none), taken.far.get(owner, none)
                    of = self._rings.setdefault(owner, [{} for _ in range(self._count)])
                    of[state][number] = near / multiple, far / multiple
                for sender, load in taken.sends.items():
                    sent = self._sends.setdefault(sender, tuple({} for _ in range(self._count)))
                    sent[state][number] = load / multiple
                for index, load in taken.neighbours.items():
                    self.neighbours[index][state][number] = load

    def _add_between(
        self, groups: Iterable[int], senders: Mapping[SendKey, Fraction], state: int
    ) -> None:
        """Add the direct links between GPUs without a switch, for each group and each sender.

        Such a link limits one group or one sender; it carries the bytes of the GPUs' own links.
        """
        link = self._cluster.switch_link
        own = FoldedLinks(
            ("between",), Fraction(1), Fraction(link.bytes_per_s), carries_bytes=False
        )
        either: list[int | SendKey] = [*groups, *senders]
        for each in either:
            if each not in self._between:
                self._between[each] = self._add(own)
        for sender, load in senders.items():
            sent = self._sends.setdefault(sender, tuple({} for _ in range(self._count)))
            sent[state][self._between[sender]] = load / self._cluster.link_share(2)

    def _of(self, names: tuple[str, ...], count: Fraction, links: LinkClass) -> int:
        return self._add(FoldedLinks(names, count, links.bytes_per_s, links.carries_bytes))

    def _add(self, folded: FoldedLinks) -> int:
        self.classes.append(folded)
        return len(self.classes) - 1

    def demand(
        self,
        communicator: CommunicatorClass,
        operation: CollectiveOperation,
        ring_bytes: int,
        *,
        state: int,
        between_bytes: int | None = None,
    ) -> LinkLoad | None:
        """Return the loads of a collective; None if it is a plain ring.

        With unequal blocks, the busiest domain exchanges `between_bytes` with the others.
        """
        shape = GroupShape(ranks=communicator.ranks, nodes=communicator.domains)
        found = self._demands.of(operation, ring_bytes, shape, between_bytes=between_bytes)
        if found is None or shape.nodes == 1:
            return found
        return replace(found, latency_ps=found.latency_ps + communicator.climb_ps[state])

    def ring(self, communicator: CommunicatorClass, demand: LinkLoad | None = None) -> States:
        """Return the loads of a ring, or of `demand`, in every communicator of the class."""
        near, far = (demand.near, demand.far) if demand else (Fraction(1), Fraction(1))
        found: list[Loads] = []
        for parts in self._rings.get(communicator.index, [{}] * self._count):
            loads = {link: one * near + other * far for link, (one, other) in parts.items()}
            if (between := self._between.get(communicator.index)) is not None:
                shape = GroupShape(ranks=communicator.ranks, nodes=communicator.domains)
                loads[between] = near / self._cluster.link_share(shape.ranks_per_node)
            found.append({link: load for link, load in sorted(loads.items()) if load > 0})
        return tuple(found)

    def send(self, source: RankClass, group: str, offset: int) -> States:
        """Return the loads of one byte sent by every rank of `source`."""
        return self._sends.get((source.index, group, offset), ({},) * self._count)

    def carried(self, rank_class: RankClass, what: Carried) -> States | None:
        """Return the loads of one byte moved on the host side by every rank of the class.

        None if no links that carry it are described.
        """
        states = self._sends.get((rank_class.index, what.flow, 0))
        if states is None:
            return None
        own = self._own_loads(what)
        return tuple(
            {
                link: taken * own.get(self.classes[link].names[0], what.share)
                for link, taken in state.items()
            }
            for state in states
        )

    def _own_loads(self, what: Carried) -> dict[str, Fraction]:
        """Return by link name the load per byte of `what`, where it is not its `share`."""
        cluster = self._cluster
        found = {DRIVES_BUSY: load_of(cluster, what.flow, DRIVES_BUSY)}
        if what.share < 1:  # the slowest link of its route limits one rank
            speeds = {each.names[0]: each.bytes_per_s for each in self.classes}
            hops = path(cluster, what.flow)
            slowest = min(speeds[name] for name, _ in hops)
            found |= {name: speeds[name] / slowest for name, level in hops if level is Level.RANK}
        if what.kernel is not None:
            cpu = need_cpu(cluster).cpu
            assert cpu is not None
            found[CPU_CORES] = 1 / cpu.share(what.kernel)
        if what.access is not None:
            drives = need_drives(cluster)
            whole = drives.count * drives.rate(writes=False)
            writes = what.flow.writes_drives
            alone = drive_bytes_per_s(drives, what.access, writes=writes)
            found[IO_REQUESTS] = Fraction(whole, alone)
        return found

    def latency_ps(self, flow: HostFlow) -> int:
        """Return the delay before the bytes of a host-side flow move, in picoseconds."""
        copies, drives = self._cluster.copies, self._cluster.drives
        match flow:
            case HostFlow.COPY_OUT | HostFlow.COPY_IN:
                return 0 if copies is None else copies.latency_ps
            case HostFlow.KERNEL:
                return 0
            case _:
                return 0 if drives is None else drives.latency_ps

    def lap_ps(self, communicator: CommunicatorClass, state: int) -> int:
        """Return the time of the first byte once around the ring, in picoseconds."""
        shape = RingShape(ranks=communicator.ranks, nodes=communicator.domains)
        return shape.lap_ps(self._cluster) + communicator.climb_ps[state]

    def send_latency_ps(self, source: RankClass, group: str, offset: int, state: int) -> int:
        """Return the latency to the peer, in picoseconds."""
        peer = source.peers[group, offset]
        way_ps = far_ps(self._cluster) if peer.is_far else near_ps(self._cluster)
        return way_ps + peer.climb_ps[state]


def shapes(loads: States) -> tuple[Shape, ...]:
    """Return loads in the network's format, by state."""
    return tuple(tuple(each.items()) for each in loads)


def joined(parts: list[tuple[States, int]]) -> tuple[tuple[Shape, ...], int]:
    """Return shapes and bytes of one activity that moves all `parts` (loads, bytes) together.

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
