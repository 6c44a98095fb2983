"""Routes through a fabric given edge by edge: fewest hops, split evenly between equal routes.

A link may count as several hops (`FabricEdge.hops`).
"""

import heapq
import re
from collections.abc import Collection, Iterable, Sequence
from fractions import Fraction
from typing import Final, NamedTuple

import numpy as np

from zsim.cluster.cluster import FabricEdge, FabricRouting
from zsim.cluster.links import forwarding
from zsim_des.network.communicator_placement import Ints

PARTS: Final = 8
"""Shares of the bytes on longer routes that adaptive routing chooses from are of this size."""


class CutError(ValueError):
    """No route is left between ranks that have to exchange bytes; the message names the cut."""


class _Way(NamedTuple):
    """One direction of a link."""

    target: str
    link: int
    latency_ps: int
    hops: int


class _Path(NamedTuple):
    """Routes from one node to another: (link, divisor) pairs, and the longest latency.

    A link that several routes share has one entry for each part 1 / divisor of its load.
    """

    parts: list[tuple[int, int]]
    latency_ps: int


class EdgeRoutes:
    """Both directions of every edge as links, numbered from `first` on; `dead` edges are omitted.

    Each switch splits bytes evenly over all links that lead to the target in the fewest hops, as
    switches do that hash flows over equal-cost paths (RFC 2992). Adaptive routing also sends
    bytes through every other group, evenly, where that lowers the load of the fullest link: UGAL
    of Kim et al. 2008 (Technology-driven, highly-scalable dragonfly topology), whose choice by
    packet is one share here for all pairs of nodes that exchange bytes at a time. A group is what
    links of one hop join.
    """

    def __init__(
        self,
        edges: Sequence[FabricEdge],
        first: int,
        dead: Collection[tuple[str, str]] = (),
        routing: FabricRouting = FabricRouting.MINIMAL,
    ) -> None:
        ends = {end for edge in edges for end in (edge.source, edge.target)}
        self._nodes = {end for end in ends if re.fullmatch(r"node\d+", end)}
        self._hosts = self._nodes - forwarding(edges)
        self._next: dict[str, list[_Way]] = {}
        self._distances: dict[str, dict[str, int]] = {}
        self._paths: dict[tuple[int, int], _Path] = {}
        self._longer: dict[tuple[int, int], _Path] = {}
        self._bytes_per_s: dict[int, int] = {}
        for index, edge in enumerate(edges):
            pair = (edge.source, edge.target)
            if pair in dead or pair[::-1] in dead:
                continue
            for number, (source, target) in enumerate((pair, pair[::-1]), first + 2 * index):
                way = _Way(target, number, edge.link.latency_ps, edge.hops)
                self._next.setdefault(source, []).append(way)
                self._bytes_per_s[number] = edge.link.bytes_per_s
        self._is_adaptive = routing is FabricRouting.ADAPTIVE
        self._group = self._groups() if self._is_adaptive else {}

    def links(self, source: Ints, target: Ints) -> tuple[Ints, Ints, Ints]:
        """Return for each pair of nodes the links of its routes, the pair's index and the divisor.

        Raises:
            CutError: no route leads from one node to the other.
        """
        found: list[tuple[int, int, int]] = []
        for index, path in enumerate(self._chosen(source, target)):
            found += [(link, index, divisor) for link, divisor in path.parts]
        link, which, divisor = np.array(found, np.int64).reshape(-1, 3).T
        return link, which, divisor

    def latency_ps(self, source: Ints, target: Ints) -> Ints:
        """Return the latency of the longest route between each pair of nodes, in picoseconds."""
        return np.array([path.latency_ps for path in self._chosen(source, target)], np.int64)

    def _chosen(self, source: Ints, target: Ints) -> list[_Path]:
        """Return the routes of each pair of nodes; all pairs exchange bytes at the same time."""
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        direct = [self._path(pair) for pair in pairs]
        if not self._is_adaptive:
            return direct
        longer = [self._detour(pair) for pair in pairs]
        loads = [self._loads(paths) for paths in (direct, longer)]
        shares = [Fraction(part, PARTS) for part in range(PARTS)]
        least = min(shares, key=lambda share: _fullest(loads, share))
        return [_mixed(one, other, least) for one, other in zip(direct, longer, strict=True)]

    def _loads(self, paths: Iterable[_Path]) -> dict[int, Fraction]:
        """Return the time that each link takes for one byte of each path."""
        found: dict[int, Fraction] = {}
        for path in paths:
            for link, divisor in path.parts:
                took = Fraction(1, divisor * self._bytes_per_s[link])
                found[link] = found.get(link, Fraction(0)) + took
        return found

    def _path(self, pair: tuple[int, int]) -> _Path:
        """Return the shortest routes between two nodes."""
        if pair not in self._paths:
            self._paths[pair] = self._spread(*(f"node{node}" for node in pair))
        return self._paths[pair]

    def _detour(self, pair: tuple[int, int]) -> _Path:
        """Return the routes between two nodes through each group without them, evenly.

        They are the shortest ones where no group leads on, or both nodes are of one.
        """
        if pair not in self._longer:
            source, target = (f"node{node}" for node in pair)
            ends = {self._group[source], self._group[target]}
            relays = sorted(set(self._entries(source).items()) if len(ends) > 1 else ())
            ways = [
                (self._spread(source, relay), self._spread(relay, target))
                for group, relay in relays
                if group not in ends and relay in self._distance(target)
            ]
            found = self._path(pair)
            if ways:
                parts = [
                    (link, divisor * len(ways))
                    for halves in ways
                    for half in halves
                    for link, divisor in half.parts
                ]
                latest = max(first.latency_ps + second.latency_ps for first, second in ways)
                found = _Path(parts, latest)
            self._longer[pair] = found
        return self._longer[pair]

    def _entries(self, source: str) -> dict[int, str]:
        """Return for each group the nearest switch of it, seen from `source`."""
        found: dict[int, str] = {}
        away = self._distance(source)  # links work in both directions, or in none
        for end in sorted(away, key=lambda each: (away[each], each)):
            if end not in self._nodes:
                found.setdefault(self._group[end], end)
        return found

    def _groups(self) -> dict[str, int]:
        """Return the group of each end: what links of one hop join."""
        found: dict[str, int] = {}
        for start in sorted(self._next):
            waiting = [start] if start not in found else []
            while waiting:
                here = waiting.pop()
                if here not in found:
                    found[here] = len(found) if here == start else found[start]
                    waiting += [way.target for way in self._next[here] if way.hops == 1]
        return found

    def _spread(self, source: str, target: str) -> _Path:
        """Return the shortest routes from one end to another."""
        distance = self._distance(target)
        if source not in distance:
            raise CutError(f"fabric: no way leads from {source} to {target}: {self._cut(distance)}")
        found: list[tuple[int, int]] = []
        shares, latest = {source: Fraction(1)}, {source: 0}
        farthest = [(-distance[source], source)]  # farther ends first: their bytes arrive here
        while farthest:
            away, here = heapq.heappop(farthest)
            if here == target:
                break
            nearer = [
                way
                for way in self._next[here]
                if distance.get(way.target) == -away - way.hops
                and (way.target == target or way.target not in self._hosts)
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
        return _Path(found, latest[target])

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
                if here in self._hosts and here != target:
                    continue
                for way in self._next.get(here, ()):
                    if way.target not in found:
                        heapq.heappush(nearest, (hops + way.hops, way.target))
        return found


def _fullest(loads: Sequence[dict[int, Fraction]], share: Fraction) -> Fraction:
    """Return the time of the fullest link with `share` of the bytes on the second loads' routes."""
    direct, longer = loads
    return max(
        (
            (1 - share) * direct.get(link, Fraction(0)) + share * longer.get(link, Fraction(0))
            for link in direct.keys() | longer.keys()
        ),
        default=Fraction(0),
    )


def _mixed(direct: _Path, longer: _Path, share: Fraction) -> _Path:
    """Return routes that carry `share` of the bytes on `longer`, and the rest on `direct`."""
    if not share or longer is direct:
        return direct
    parts = [
        (link, divisor * part.denominator)
        for path, part in ((direct, 1 - share), (longer, share))
        for link, divisor in path.parts
        for _ in range(part.numerator)
    ]
    return _Path(parts, max(direct.latency_ps, longer.latency_ps))
