"""The ring algorithm: its bytes for a collective, and the latency of a lap.

Ranks of a node are adjacent in the ring, so every node is entered and left once. A ring with m
ranks on a node stands for m rings, each with 1/m of the bytes: ring j leaves the node at its j-th
rank and enters the next at the following one. (NCCL builds such rings to use every NIC: its
environment variable NCCL_CROSS_NIC and graph search, src/graph/search.cc.)

Bytes: Patarasuk and Yuan 2009, section 4. Latency: in each phase a chunk passes N - 1 edges of the
ring in sequence, and the slowest chunk omits the fastest edge; an all-reduce has two phases.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import assert_never

from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Activity, Collective, GroupShape, LinkBytes
from zsim.network.algorithm.algorithm import ALL_PROTOCOLS, Algorithm, Request
from zsim.network.algorithm.path_latency import far_ps, near_ps


@dataclass(frozen=True, slots=True, kw_only=True)
class RingShape:
    """The ranks of a ring and their nodes, on which its latency depends."""

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
        """Return bytes and hops of a ring, or None for an all-to-all and a send/receive.

        A broadcast and a reduction are a chain: every rank but the last forwards all S bytes. A
        rank's own shard is not sent: an all-gather copies it, a reduce-scatter adds it at its end,
        and an all-reduce between its laps.
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
        """Return None without a profile: the backend then uses its plain ring."""
        return None if profile is None else super().activity(request, profile)
