"""Faults and neighbours as the simulation meets them: by rank, by link, at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import exp
from statistics import NormalDist

import numpy as np

from zsim.backend import RefusedError
from zsim.cluster import Cluster
from zsim.fault import (
    DeadNic,
    Fault,
    Jitter,
    Neighbour,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim_des.colour import mixed
from zsim_des.spread import Ints
from zsim_des.wiring import Table, Wiring

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Pace:
    """How long kernels of one rank take."""

    slow: tuple[SlowGpu, ...]
    jitter: tuple[Jitter, ...]
    key: int

    def end_ps(self, start_ps: int, time_ps: int, which: int) -> int:
        """When a kernel of `time_ps` that starts at `start_ps` ends; `which` tells draws apart."""
        left = Fraction(time_ps)
        for number, jitter in enumerate(self.jitter):
            if jitter.window.holds(start_ps):
                left *= Fraction(exp(jitter.deviation * self._normal(which, number)))
        now = Fraction(start_ps)
        while True:
            factor = Fraction(1)
            change: int | None = None
            for fault in self.slow:
                if fault.window.holds(int(now)):
                    factor *= fault.factor
                for edge in (fault.window.start_ps, fault.window.end_ps):
                    if edge is not None and edge > now and (change is None or edge < change):
                        change = edge
            end = now + left * factor
            if change is None or end <= change:
                return -(-end.numerator // end.denominator)
            left -= (change - now) / factor
            now = Fraction(change)

    def _normal(self, which: int, number: int) -> float:
        key = np.array([self.key], np.uint64) + np.uint64(which * 16 + number)
        return NORMAL.inv_cdf((int(mixed(key, self.key)[0]) + 1) / (2**64 + 2))


class Trouble:
    """Faults and neighbours of one run on a cluster.

    Raises:
        RefusedError: one of them names something that the cluster does not have.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        neighbours: Sequence[Neighbour],
        *,
        cluster: Cluster,
        seed: int,
    ) -> None:
        self.neighbours = neighbours
        self._faults = faults
        self.cluster = cluster
        self._seed = seed
        self.dead: list[tuple[int, int]] = []
        self.jitters = any(isinstance(fault, Jitter) for fault in faults)
        for index, fault in enumerate(faults):
            self._must_exist(f"fault {index}", fault)
        for index, neighbour in enumerate(neighbours):
            _must_be_below(
                f"neighbour {index}: last_node", neighbour.last_node, cluster.nodes, "nodes"
            )
        rails = min(cluster.gpus_per_node, cluster.nics_per_node)
        self._per_rail = Fraction(cluster.nics_per_node, rails)
        if self._per_rail == 1:
            self.dead = [(each.node, each.nic) for each in faults if isinstance(each, DeadNic)]

    def _must_exist(self, name: str, fault: Fault) -> None:
        cluster = self.cluster
        match fault:
            case SlowGpu(rank=rank) | SlowSwitchLink(rank=rank):
                _must_be_below(f"{name}: rank", rank, cluster.ranks, "ranks")
            case SlowNic(node=node, nic=nic) | DeadNic(node=node, nic=nic):
                _must_be_below(f"{name}: node", node, cluster.nodes, "nodes")
                _must_be_below(f"{name}: nic", nic, cluster.nics_per_node, "NICs of a node")
            case SlowUplinks(tier=tier, group=group):
                tiers = cluster.fabric.tiers
                _must_be_below(f"{name}: tier", tier, len(tiers), "tiers of the fabric")
                groups = -(-cluster.nodes // tiers[tier].nodes_below)
                _must_be_below(f"{name}: group", group, groups, f"groups of {tiers[tier].name}")
            case Jitter():
                pass

    def rank_marks(self, count: int) -> Ints:
        """By rank a number; ranks with different faults have different ones."""
        if self.jitters:
            return np.arange(count)
        marks = np.zeros(count, np.int64)
        for index, fault in enumerate(self._faults):
            if isinstance(fault, SlowGpu | SlowSwitchLink) and fault.rank < count:
                marks[fault.rank] = marks[fault.rank] * (len(self._faults) + 1) + index + 1
        return marks

    def pace(self, rank: int) -> Pace | None:
        """How long kernels of `rank` take; None if as long as they should."""
        slow = tuple(f for f in self._faults if isinstance(f, SlowGpu) and f.rank == rank)
        jitter = tuple(fault for fault in self._faults if isinstance(fault, Jitter))
        if not slow and not jitter:
            return None
        return Pace(slow, jitter, int(mixed(np.array([rank]), self._seed)[0]) >> 8)

    def switch_links(self, rank: int) -> list[tuple[Fraction, Window]]:
        """How the link of `rank` to its switch is slow, and when."""
        return [
            (fault.factor, fault.window)
            for fault in self._faults
            if isinstance(fault, SlowSwitchLink) and fault.rank == rank
        ]

    def links(self, wiring: Wiring) -> dict[int, list[tuple[Fraction, Window]]]:
        """By number the links between nodes that are slow: how, and when."""
        found: dict[int, list[tuple[Fraction, Window]]] = {}
        for fault in self._faults:
            match fault:
                case SlowNic(node=node, nic=nic, factor=factor, window=window):
                    numbers = wiring.nic_links(node, self._rail(nic))
                case SlowUplinks(tier=tier, group=group, factor=factor, window=window):
                    numbers = wiring.uplinks(tier, group)
                case DeadNic(node=node, nic=nic) if self._per_rail > 1:
                    numbers = wiring.nic_links(node, self._rail(nic))
                    factor, window = self._per_rail / (self._per_rail - 1), Window()
                case _:
                    continue
            for number in numbers:
                found.setdefault(number, []).append((factor, window))
        return found

    def _rail(self, nic: int) -> int:
        """The bundle that a NIC is in: its load is spread evenly, so its slowest NIC limits it."""
        return int(nic / self._per_rail)

    def tables(self, wiring: Wiring) -> list[Table]:
        """What each neighbour puts on links."""
        return [wiring.neighbour(each.first_node, each.last_node) for each in self.neighbours]


def _must_be_below(name: str, number: int, limit: int, what: str) -> None:
    if not 0 <= number < limit:
        allowed = f"must be 0 to {limit - 1}" if limit else "is none"
        raise RefusedError(f"{name}: {number} {allowed}: there are {limit} {what}")
