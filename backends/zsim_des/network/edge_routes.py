"""Ways through a fabric that is given edge by edge: the fewest hops, shared evenly if several."""

import re
from collections import deque
from collections.abc import Collection, Sequence
from fractions import Fraction

import numpy as np

from zsim.cluster.cluster import FabricEdge
from zsim_des.network.communicator_placement import Ints


class CutError(ValueError):
    """No way is left between ranks that have to exchange bytes; the message names the cut."""


class EdgeRoutes:
    """Both directions of every edge as links, numbered from `first` on; `dead` edges are none.

    At each switch bytes go on in equal parts over all links that lead to the target in the fewest
    hops, as switches do that hash flows over equal-cost ways (RFC 2992).
    """

    def __init__(
        self, edges: Sequence[FabricEdge], first: int, dead: Collection[tuple[str, str]] = ()
    ) -> None:
        ends = {end for edge in edges for end in (edge.source, edge.target)}
        self._nodes = {end for end in ends if re.fullmatch(r"node\d+", end)}
        self._next: dict[str, list[tuple[str, int, int]]] = {}
        self._distances: dict[str, dict[str, int]] = {}
        self._ways: dict[tuple[int, int], tuple[list[tuple[int, int]], int]] = {}
        for index, edge in enumerate(edges):
            pair = (edge.source, edge.target)
            if pair in dead or pair[::-1] in dead:
                continue
            for number, (source, target) in enumerate((pair, pair[::-1]), first + 2 * index):
                self._next.setdefault(source, []).append((target, number, edge.link.latency_ps))

    def links(self, source: Ints, target: Ints) -> tuple[Ints, Ints, Ints]:
        """Links on the ways between nodes, the index of the way, and the divisor of its bytes.

        Raises:
            CutError: no way leads from one to the other.
        """
        found: list[tuple[int, int, int]] = []
        for index, pair in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            found += [(link, index, divisor) for link, divisor in self._way(pair)[0]]
        link, which, divisor = np.array(found, np.int64).reshape(-1, 3).T
        return link, which, divisor

    def latency_ps(self, source: Ints, target: Ints) -> Ints:
        """Picoseconds of the longest of the ways between nodes."""
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        return np.array([self._way(pair)[1] for pair in pairs], np.int64)

    def _way(self, pair: tuple[int, int]) -> tuple[list[tuple[int, int]], int]:
        """Numbers of the links between two nodes, each with its divisors; the longest latency.

        A link on which several ways meet has an entry for each part 1 / divisor of its share.
        """
        if pair not in self._ways:
            self._ways[pair] = self._spread(*(f"node{node}" for node in pair))
        return self._ways[pair]

    def _spread(self, source: str, target: str) -> tuple[list[tuple[int, int]], int]:
        distance = self._distance(target)
        if source not in distance:
            raise CutError(f"fabric: no way leads from {source} to {target}: {self._cut(distance)}")
        found: list[tuple[int, int]] = []
        shares, latest = {source: Fraction(1)}, {source: 0}
        while target not in shares:
            beyond: dict[str, Fraction] = {}
            for here, share in shares.items():
                nearer = [
                    each for each in self._next[here] if distance.get(each[0]) == distance[here] - 1
                ]
                part = share / len(nearer)
                for there, number, latency_ps in nearer:
                    found += [(number, part.denominator)] * part.numerator
                    beyond[there] = beyond.get(there, Fraction(0)) + part
                    latest[there] = max(latest.get(there, 0), latest[here] + latency_ps)
            shares = beyond
        return found, latest[target]

    def _cut(self, reached: Collection[str]) -> str:
        """Return what is cut off, if some have a way to each other: the smaller part."""
        inside = self._nodes.intersection(reached)
        few = min(inside, self._nodes - inside, key=lambda side: (len(side), "node0" in side))
        names = sorted(few, key=lambda name: int(name.removeprefix("node")))
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"{shown} ({len(few)} of {len(self._nodes)} nodes) cannot reach the others"

    def _distance(self, target: str) -> dict[str, int]:
        """Hops to `target` from everywhere that has a way there; links lead both ways."""
        found = self._distances.get(target)
        if found is None:
            found = self._distances[target] = {target: 0}
            waiting = deque([target])
            while waiting:
                here = waiting.popleft()
                for there, _, _ in self._next.get(here, ()):
                    if there not in found:
                        found[there] = found[here] + 1
                        waiting.append(there)
        return found
