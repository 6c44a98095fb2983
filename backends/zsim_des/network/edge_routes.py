"""Routes through a fabric given edge by edge: fewest hops, split evenly between equal routes.

A link may count as several hops (`FabricEdge.hops`).
"""

import heapq
import re
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from zsim.cluster.cluster import FabricEdge
from zsim_des.network.communicator_placement import Ints


class CutError(ValueError):
    """No route is left between ranks that have to exchange bytes; the message names the cut."""


class _Way(NamedTuple):
    """One direction of a link, away from where it is listed."""

    target: str
    link: int
    latency_ps: int
    hops: int


class EdgeRoutes:
    """Both directions of every edge as links, numbered from `first` on; `dead` edges are omitted.

    Each switch splits bytes evenly over all links that lead to the target in the fewest hops, as
    switches do that hash flows over equal-cost paths (RFC 2992).
    """

    def __init__(
        self, edges: Sequence[FabricEdge], first: int, dead: Collection[tuple[str, str]] = ()
    ) -> None:
        ends = {end for edge in edges for end in (edge.source, edge.target)}
        self._nodes = {end for end in ends if re.fullmatch(r"node\d+", end)}
        self._next: dict[str, list[_Way]] = {}
        self._distances: dict[str, dict[str, int]] = {}
        self._paths: dict[tuple[int, int], tuple[list[tuple[int, int]], int]] = {}
        for index, edge in enumerate(edges):
            pair = (edge.source, edge.target)
            if pair in dead or pair[::-1] in dead:
                continue
            for number, (source, target) in enumerate((pair, pair[::-1]), first + 2 * index):
                way = _Way(target, number, edge.link.latency_ps, edge.hops)
                self._next.setdefault(source, []).append(way)

    def links(self, source: Ints, target: Ints) -> tuple[Ints, Ints, Ints]:
        """Return for each pair of nodes the links of its routes, the pair's index and the divisor.

        Raises:
            CutError: no route leads from one node to the other.
        """
        found: list[tuple[int, int, int]] = []
        for index, pair in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            found += [(link, index, divisor) for link, divisor in self._path(pair)[0]]
        link, which, divisor = np.array(found, np.int64).reshape(-1, 3).T
        return link, which, divisor

    def latency_ps(self, source: Ints, target: Ints) -> Ints:
        """Return the latency of the longest route between each pair of nodes, in picoseconds."""
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        return np.array([self._path(pair)[1] for pair in pairs], np.int64)

    def _path(self, pair: tuple[int, int]) -> tuple[list[tuple[int, int]], int]:
        """Return the links between two nodes, each with a divisor, and the longest latency.

        A link that several routes share has one entry for each part 1 / divisor of its load.
        """
        if pair not in self._paths:
            self._paths[pair] = self._spread(*(f"node{node}" for node in pair))
        return self._paths[pair]

    def _spread(self, source: str, target: str) -> tuple[list[tuple[int, int]], int]:
        distance = self._distance(target)
        if source not in distance:
            raise CutError(f"fabric: no way leads from {source} to {target}: {self._cut(distance)}")
        found: list[tuple[int, int]] = []
        shares, latest = {source: Fraction(1)}, {source: 0}
        farthest = [(-distance[source], source)]  # all that arrives at an end is known at its turn
        while farthest:
            away, here = heapq.heappop(farthest)
            if here == target:
                break
            nearer = [
                way for way in self._next[here] if distance.get(way.target) == -away - way.hops
            ]
            part = shares[here] / len(nearer)
            for way in nearer:
                found += [(way.link, part.denominator)] * part.numerator
                if way.target not in shares:
                    shares[way.target] = Fraction(0)
                    heapq.heappush(farthest, (-distance[way.target], way.target))
                shares[way.target] += part
                after = latest[here] + way.latency_ps
                latest[way.target] = max(latest.get(way.target, 0), after)
        return found, latest[target]

    def _cut(self, reached: Collection[str]) -> str:
        """Describe the smaller of the two groups of nodes that cannot reach each other."""
        inside = self._nodes.intersection(reached)
        few = min(inside, self._nodes - inside, key=lambda side: (len(side), "node0" in side))
        names = sorted(few, key=lambda name: int(name.removeprefix("node")))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"{shown} ({len(few)} of {len(self._nodes)} nodes) cannot reach the others"

    def _distance(self, target: str) -> dict[str, int]:
        """Return the hops to `target` from every node that reaches it."""
        found = self._distances.get(target)
        if found is None:
            found = self._distances[target] = {}
            nearest = [(0, target)]
            while nearest:
                hops, here = heapq.heappop(nearest)
                if here in found:
                    continue
                found[here] = hops
                for way in self._next.get(here, ()):
                    if way.target not in found:
                        heapq.heappush(nearest, (hops + way.hops, way.target))
        return found
