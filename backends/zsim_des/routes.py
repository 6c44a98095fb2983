"""Ways through a fabric that is given edge by edge: the fewest hops, always the same ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import networkx as nx
import numpy as np

from zsim.cluster import FabricEdge
from zsim_des.spread import Ints


class CutError(ValueError):
    """No way is left between ranks that have to exchange bytes; the message names the cut."""


class Routes:
    """Both directions of every edge as links, numbered from `first` on.

    `hops` has their names and bytes per second.
    """

    def __init__(self, edges: Sequence[FabricEdge], first: int) -> None:
        self.hops: list[tuple[str, int]] = []
        self._graph: nx.DiGraph[str] = nx.DiGraph()
        self._ways: dict[tuple[int, int], tuple[list[int], int]] = {}
        for edge in edges:
            for source, target in ((edge.source, edge.target), (edge.target, edge.source)):
                number = first + len(self.hops)
                self._graph.add_edge(source, target, number=number, latency_ps=edge.link.latency_ps)
                self.hops.append((f"{source}->{target}", edge.link.bytes_per_s))

    def links(self, source: Ints, target: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Links on the ways between nodes, and the index of the way, a pair of arrays each."""
        for index, pair in enumerate(zip(source.tolist(), target.tolist(), strict=True)):
            numbers, _ = self._way(pair)
            yield np.array(numbers, np.int64), np.full(len(numbers), index)

    def latency_ps(self, source: Ints, target: Ints) -> Ints:
        """Picoseconds of the ways between nodes."""
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        return np.array([self._way(pair)[1] for pair in pairs], np.int64)

    def _way(self, pair: tuple[int, int]) -> tuple[list[int], int]:
        """Numbers of the links between two nodes, and their latency."""
        if pair not in self._ways:
            source, target = (f"node{node}" for node in pair)
            try:
                way = nx.shortest_path(self._graph, source, target)
            except (nx.NetworkXNoPath, nx.NodeNotFound):
                raise CutError(f"fabric: no way leads from {source} to {target}") from None
            edges = [self._graph.edges[hop] for hop in pairwise(way)]
            self._ways[pair] = (
                [edge["number"] for edge in edges],
                sum(edge["latency_ps"] for edge in edges),
            )
        return self._ways[pair]
