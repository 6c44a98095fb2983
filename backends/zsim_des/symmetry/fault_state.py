"""Faults and neighbours as the simulation uses them: by rank, by link, by time."""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import exp, prod
from statistics import NormalDist
from typing import assert_never

import numpy as np

from zsim.backend.backend import RefusedError
from zsim.cluster.absent_hardware import absence, beyond
from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import (
    Dead,
    Fault,
    Jitter,
    Neighbour,
    Slow,
    SlowEdge,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim.cluster.host_side import Drives
from zsim_des.network.communicator_placement import Ints
from zsim_des.network.link_numbering import Wiring
from zsim_des.network.outage import Outages
from zsim_des.symmetry.refinement import mixed

NORMAL = NormalDist()


def _known_rates(drives: Drives | None) -> tuple[bool, ...]:
    if drives is None:
        return ()
    return drives.read_bytes_per_s is None, drives.write_bytes_per_s is None


class Pace:
    """Durations of the kernels of one rank."""

    def __init__(self, slow: Sequence[SlowGpu], jitter: Sequence[Jitter], key: int) -> None:
        self._jitter = jitter
        self._key = key
        edges = {0} | {fault.window.start_ps for fault in slow}
        edges |= {fault.window.end_ps for fault in slow if fault.window.end_ps is not None}
        self._changes_ps = sorted(edges)
        self._factors = [
            prod((fault.factor for fault in slow if fault.window.holds(edge)), start=Fraction(1))
            for edge in self._changes_ps
        ]
        self._only = None  # numerator and denominator of a factor that never changes
        if len(self._factors) == 1 and not jitter:
            self._only = self._factors[0].as_integer_ratio()

    def end_ps(self, start_ps: int, time_ps: int, which: int) -> int:
        """Return the end of a kernel of `time_ps` from `start_ps`; `which` selects its jitter."""
        if self._only is not None:
            over, under = self._only
            return start_ps - (-time_ps * over // under)
        left: int | Fraction = time_ps
        for number, jitter in enumerate(self._jitter):
            if jitter.window.holds(start_ps):
                left *= Fraction(exp(jitter.deviation * self._normal(which, number)))
        at = bisect_right(self._changes_ps, start_ps) - 1
        now = start_ps
        for change_ps, factor in zip(self._changes_ps[at + 1 :], self._factors[at:], strict=False):
            if now + left * factor <= change_ps:
                return _ceiling(now, left, factor)
            left -= (change_ps - now) / factor
            now = change_ps
        return _ceiling(now, left, self._factors[-1])

    def _normal(self, which: int, number: int) -> float:
        key = np.array([self._key], np.uint64) + np.uint64(which * 16 + number)
        return NORMAL.inv_cdf((int(mixed(key, self._key)[0]) + 1) / (2**64 + 2))


def _ceiling(now: int, left: int | Fraction, factor: Fraction) -> int:
    """Return `now` plus `factor` times `left`, rounded up."""
    over, under = left.numerator * factor.numerator, left.denominator * factor.denominator
    return now - (-over // under)


class Disturbances:
    """Faults and neighbours of one run on a cluster.

    Raises:
        RefusedError: one of them names hardware that the cluster does not have.
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
        self._faults = tuple(faults)
        self.cluster = cluster
        self._seed = seed
        self.jitters = any(isinstance(fault, Jitter) for fault in faults)
        for index, fault in enumerate(faults):
            _refuse(f"fault {index}", absence(fault, cluster, cluster.ranks))
        for index, neighbour in enumerate(neighbours):
            last = beyond("last_node", neighbour.last_node, cluster.nodes, "nodes")
            _refuse(f"neighbour {index}", last)
        self.outages = Outages([fault for fault in faults if isinstance(fault, Dead)], cluster)

    def shape(self) -> tuple[object, ...]:
        """Return a key of everything that affects folding; equal keys have equal classes."""
        cluster, fabric = self.cluster, self.cluster.fabric
        board = cluster.board_link
        return (
            (cluster.nodes, cluster.gpus_per_node, cluster.nics_per_node),
            (cluster.nodes_per_domain, cluster.gpus_per_pcie_switch, cluster.pcie_link is None),
            (cluster.gpus_per_root_port, cluster.copies is None),
            (cluster.host is None, cluster.host is None or cluster.host.cpu is None),
            _known_rates(cluster.drives),
            None if board is None else board.latency_ps,
            (fabric.kind, fabric.edges),
            tuple((tier.name, tier.nodes_below, tier.latency_ps) for tier in fabric.tiers),
            (self._faults, tuple(self.neighbours)),
        )

    def rank_marks(self, count: int) -> Ints:
        """Return a number per rank; ranks with different faults have different numbers."""
        if self.jitters:
            return np.arange(count)
        marks = np.zeros(count, np.int64)
        for index, fault in enumerate(self._faults):
            if isinstance(fault, SlowGpu) and fault.rank < count:
                marks[fault.rank] = marks[fault.rank] * (len(self._faults) + 1) + index + 1
        return marks

    def pace(self, rank: int) -> Pace | None:
        """Return the pace of kernels of `rank`; None if no fault changes it."""
        slow = tuple(f for f in self._faults if isinstance(f, SlowGpu) and f.rank == rank)
        jitter = tuple(fault for fault in self._faults if isinstance(fault, Jitter))
        if not slow and not jitter:
            return None
        return Pace(slow, jitter, int(mixed(np.array([rank]), self._seed)[0]) >> 8)

    def links(self, wiring: Wiring) -> dict[int, list[tuple[Fraction, Window]]]:
        """Return the slow links by number, each with its divisors and their windows."""
        found: dict[int, list[tuple[Fraction, Window]]] = {}
        for fault in self._faults:
            if isinstance(fault, Slow):
                for number in self._slow(fault, wiring):
                    found.setdefault(number, []).append((fault.factor, fault.window))
        width = Fraction(self.cluster.nics_per_node, wiring.rails)
        for thin in self.outages.thinned:
            for number in wiring.nic_links(thin.node, thin.rail):
                factor = width / (width - thin.dead)
                found.setdefault(number, []).append((factor, thin.window))
        return found

    def _slow(self, fault: Slow, wiring: Wiring) -> tuple[int, ...]:
        """Return the numbers of the links that a fault affects."""
        match fault:
            case SlowNic(node=node, nic=nic):
                return wiring.nic_links(node, self.outages.bundle(nic))
            case SlowSwitchLink(rank=rank):
                return wiring.gpu_links(rank)
            case SlowUplinks(tier=tier, group=group, rail=rail):
                return wiring.uplinks(tier, group, self.outages.rails(tier, rail))
            case SlowEdge(source=source, target=target):
                return wiring.edge_links(source, target)
            case _:
                assert_never(fault)


def _refuse(name: str, why: str | None) -> None:
    if why is not None:
        raise RefusedError(f"{name}: {why}")
