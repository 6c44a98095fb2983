"""The ring algorithm on a cluster: which neighbours exchange how much, and how long a lap takes.

Ranks of a node stand next to each other in the ring, so every node is entered and left once. A ring
with m ranks on a node is m rings in one, each with 1/m of the bytes: ring j leaves the node at the
j-th of its ranks and enters at the next, through the NICs nearest to these. (NCCL builds such rings
to use every NIC: its environment variable NCCL_CROSS_NIC and graph search, src/graph/search.cc.)

Bytes: Patarasuk and Yuan 2009, section 4. Latency: a chunk passes N - 1 edges of the ring one after
the other in each phase, and the slowest chunk leaves out the fastest edge; an all-reduce is two
phases.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm
from typing import assert_never

from zsim.cluster import Cluster
from zsim.collective.activity import Collective, Shape, Work
from zsim.collective.graph import (
    BETWEEN_NODES,
    WITHIN_NODE,
    Device,
    Graph,
    gpu_of,
    latency_ps,
    ways,
)
from zsim.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    Communication,
    Receive,
    ReduceScatter,
    Send,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """What a ring's latency depends on: its ranks, and the nodes that they are on."""

    ranks: int
    nodes: int

    def lap_ps(self, graph: "Graph[str]") -> int:
        """Picoseconds in which a chunk passes every edge of the ring but the fastest."""
        near, far = latency_ps(graph, WITHIN_NODE), latency_ps(graph, BETWEEN_NODES)
        if self.ranks == 1:
            return 0
        if self.nodes == 1:
            return (self.ranks - 1) * near
        edges_within = self.ranks - self.nodes
        if edges_within:
            return (edges_within - 1) * near + self.nodes * far
        return (self.nodes - 1) * far


def laps(operation: Communication) -> int:
    """Times that data goes around the ring: 2 in an all-reduce, 0 where there is no ring.

    A broadcast is a chain through all ranks: one lap.
    """
    match operation:
        case AllGather() | ReduceScatter() | Broadcast():
            return 1
        case AllReduce():
            return 2
        case Send() | Receive():
            return 0
        case _:
            assert_never(operation)


def ring_edges(cluster: Cluster, members: Sequence[int]) -> dict[tuple[int, int], Fraction]:
    """Pairs of neighbours (source, target) and the share of a ring's bytes that passes there.

    `members` are ranks, ascending. The shares add up to the number of members.
    """
    nodes: dict[int, list[int]] = {}
    for rank in members:
        domain = gpu_of(cluster, rank).node // cluster.nodes_per_domain
        nodes.setdefault(domain, []).append(rank)
    if len(members) == 1:
        return {}
    ring_count = lcm(*(len(ranks) for ranks in nodes.values())) if len(nodes) > 1 else 1
    edges: Counter[tuple[int, int]] = Counter()
    for ring in range(ring_count):
        order: list[int] = []
        for ranks in nodes.values():
            first = (ring + 1) % len(ranks)
            order += ranks[first:] + ranks[:first]
        edges.update(zip(order, order[1:] + order[:1], strict=True))
    return {edge: Fraction(count, ring_count) for edge, count in edges.items()}


def link_bytes(
    cluster: Cluster, flows: Iterable[tuple[int, int, Fraction]]
) -> dict[tuple[Device, Device], Fraction]:
    """Bytes on every link of the full graph for flows given as (source, target, bytes)."""
    found: dict[tuple[Device, Device], Fraction] = {}
    for source, target, size in flows:
        for way, share in ways(cluster, gpu_of(cluster, source), gpu_of(cluster, target)):
            for hop in pairwise(way):
                found[hop] = found.get(hop, Fraction(0)) + share * size
    return found


def work(collective: Collective, shape: Shape) -> Work | None:
    """What a ring does, or None: an all-to-all and a send/receive go around no ring.

    A broadcast and a reduction are a chain: every rank but the last passes on all S bytes. What
    nobody sends is a rank's own shard: it is copied in an all-gather, and added at the end of a
    reduce-scatter and between the laps of an all-reduce.
    """
    ranks = shape.ranks
    if ranks == 1:
        return Work(gpu_bytes=Fraction(0))
    own = Fraction(1, ranks)
    match collective:
        case Collective.ALL_REDUCE:
            laps, passed = 2, 2 * (1 - own)
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            laps, passed = 1, 1 - own
        case Collective.BROADCAST | Collective.REDUCE:
            laps, passed, own = 1, Fraction(1), Fraction(0)
        case Collective.ALL_TO_ALL | Collective.SEND_RECEIVE:
            return None
        case _:
            assert_never(collective)
    far_hops = shape.nodes if shape.nodes > 1 else 0
    far_hops = min(far_hops, ranks - 1)
    return Work(
        gpu_bytes=passed,
        node_bytes=passed if far_hops else Fraction(0),
        local_bytes=own,
        near_hops=laps * (ranks - 1 - far_hops),
        far_hops=laps * far_hops,
    )
