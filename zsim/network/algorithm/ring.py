"""The ring algorithm: its bytes for a collective, and how long a lap takes.

Ranks of a node stand next to each other in the ring, so every node is entered and left once. A ring
with m ranks on a node is m rings in one, each with 1/m of the bytes: ring j leaves the node at the
j-th of its ranks and enters at the next. (NCCL builds such rings to use every NIC: its environment
variable NCCL_CROSS_NIC and graph search, src/graph/search.cc.)

Bytes: Patarasuk and Yuan 2009, section 4. Latency: a chunk passes N - 1 edges of the ring one after
the other in each phase, and the slowest chunk leaves out the fastest edge; an all-reduce is two
phases.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Activity, Collective, GroupShape, LinkBytes
from zsim.network.algorithm.algorithm import ALL_PROTOCOLS, Algorithm, Request
from zsim.network.way_latency import far_ps, near_ps


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """The ranks of a ring and the nodes that they are on, which its latency depends on."""

    ranks: int
    nodes: int

    def lap_ps(self, cluster: Cluster) -> int:
        """Return the picoseconds in which a chunk passes every edge of the ring but the fastest."""
        near, far = near_ps(cluster), far_ps(cluster)
        if self.ranks == 1:
            return 0
        if self.nodes == 1:
            return (self.ranks - 1) * near
        edges_within = self.ranks - self.nodes
        if edges_within:
            return (edges_within - 1) * near + self.nodes * far
        return (self.nodes - 1) * far


class Ring(Algorithm):
    """The ring through all ranks."""

    name = "ring"
    protocols = ALL_PROTOCOLS

    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return what a ring does, or None: an all-to-all and a send/receive go around no ring.

        A broadcast and a reduction are a chain: every rank but the last passes on all S bytes. What
        nobody sends is a rank's own shard: it is copied in an all-gather, and added at the end of a
        reduce-scatter and between the laps of an all-reduce.
        """
        ranks = shape.ranks
        if ranks == 1:
            return LinkBytes(gpu_bytes=Fraction(0))
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
        return LinkBytes(
            gpu_bytes=passed,
            node_bytes=passed if far_hops else Fraction(0),
            local_bytes=own,
            near_hops=laps * (ranks - 1 - far_hops),
            far_hops=laps * far_hops,
        )

    def activity(self, request: Request, profile: NetworkProfile | None) -> Activity | None:
        """Return None without a profile: then it is the plain ring of a backend."""
        return None if profile is None else super().activity(request, profile)
