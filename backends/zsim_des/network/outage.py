"""Outages: the dead hardware at one time, and the times of its changes."""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import (
    Dead,
    DeadEdge,
    DeadNic,
    DeadSwitchLink,
    DeadUplinks,
    Window,
)
from zsim.cluster.links import has_rails, rail_count


@dataclass(frozen=True, slots=True)
class Outage:
    """Dead bundles of NICs (node, rail), links of ranks, uplinks (tier, group, rail) and edges.

    In a tier without rails, all uplinks of a group are on rail 0.
    """

    nics: frozenset[tuple[int, int]] = frozenset()
    ranks: frozenset[int] = frozenset()
    uplinks: frozenset[tuple[int, int, int]] = frozenset()
    edges: frozenset[tuple[str, str]] = frozenset()


NOTHING_DEAD = Outage()


@dataclass(frozen=True, slots=True)
class Lasting:
    """A bundle of NICs with `dead` of them dead, and others working, in a window."""

    node: int
    rail: int
    dead: int
    window: Window


class Outages:
    """The outages of a run: `states` lists each one once, `turns` the time each one starts.

    Times count from the start of the first step; outages at that time also hold in setup. A bundle
    with some working NICs is slow, not dead: `thinned` lists these.
    """

    def __init__(self, faults: Sequence[Dead], cluster: Cluster) -> None:
        self._cluster = cluster
        self._rails = rail_count(cluster)
        edges = {0} | {fault.window.start_ps for fault in faults}
        edges |= {fault.window.end_ps for fault in faults if fault.window.end_ps is not None}
        times = sorted(edges)
        self.states: list[Outage] = []
        self.turns: list[tuple[int, int]] = []
        self.thinned: list[Lasting] = []
        for at, time_ps in enumerate(times):
            dead = [fault for fault in faults if fault.window.holds(time_ps)]
            until_ps = times[at + 1] if at + 1 < len(times) else None
            found = self._outage(dead, Window(start_ps=time_ps, end_ps=until_ps))
            if found not in self.states:
                self.states.append(found)
            self.turns.append((time_ps, self.states.index(found)))

    def _outage(self, dead: Sequence[Dead], window: Window) -> Outage:
        nics: set[tuple[int, int]] = set()
        uplinks: set[tuple[int, int, int]] = set()
        for fault in dead:
            match fault:
                case DeadNic(node=node, nic=nic):
                    nics.add((node, nic))
                case DeadUplinks(tier=tier, group=group, rail=rail):
                    uplinks |= {(tier, group, each) for each in self.rails(tier, rail)}
                case DeadSwitchLink() | DeadEdge():
                    pass
        return Outage(
            nics=frozenset(self._bundles(nics, window)),
            ranks=frozenset(each.rank for each in dead if isinstance(each, DeadSwitchLink)),
            uplinks=frozenset(uplinks),
            edges=frozenset((e.source, e.target) for e in dead if isinstance(e, DeadEdge)),
        )

    def rails(self, tier: int, rail: int | None) -> range:
        """Return the switches of a group of `tier` that a fault of `rail` affects."""
        if not has_rails(self._cluster, tier):
            return range(1)
        return range(self._rails) if rail is None else range(rail, rail + 1)

    def bundle(self, nic: int) -> int:
        """Return the bundle of a NIC. Its load is spread evenly, so its slowest NIC limits it."""
        return nic * self._rails // self._cluster.nics_per_node

    def _bundles(self, nics: set[tuple[int, int]], window: Window) -> list[tuple[int, int]]:
        """Return the bundles without a working NIC; add the others to `thinned`."""
        counts: dict[tuple[int, int], int] = {}
        for node, nic in sorted(nics):
            key = (node, self.bundle(nic))
            counts[key] = counts.get(key, 0) + 1
        gone: list[tuple[int, int]] = []
        for (node, rail), count in counts.items():
            if count * self._rails >= self._cluster.nics_per_node:
                gone.append((node, rail))
            else:
                self.thinned.append(Lasting(node, rail, count, window))
        return gone
