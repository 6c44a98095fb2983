"""Hierarchical: a ring inside each node and rings between nodes, pipelined in chunks.

An all-gather first gathers between nodes, among ranks of equal number, then inside each node; a
reduce-scatter is the reverse; an all-reduce is a reduce-scatter and an all-gather. The stages form
a pipeline, so with c chunks the slower stage is always busy, and the faster one adds the time of
its last (or first) chunk. Source: the 2-dimensional ring of Jia et al. 2018, "Highly scalable deep
learning training system", with the pipelining of Cho et al. 2019, "BlueConnect". It is not an
algorithm of NCCL, and is used only if forced.

An all-to-all first exchanges within nodes, so that a rank has the blocks of its node for the ranks
of its number on all nodes, then between nodes: n - 1 messages of m blocks in place of m (n - 1)
messages (Hwang et al. 2022, "Tutel", section 3.4).
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from math import log2

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Activity, Collective, GroupShape, LinkBytes, Protocol
from zsim.network.algorithm.algorithm import Algorithm, Request, crowding
from zsim.network.algorithm.constant import FAR_HOP_S, LINK, NIC, SIMPLE_HOP_S
from zsim.network.algorithm.direct import DIRECT
from zsim.units import PICOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Bytes per second and latency from GPU to GPU, for both stages.

    `far_bytes_per_s` is that of all NICs of a node that the group uses.
    """

    near_bytes_per_s: int
    near_latency_ps: int
    far_bytes_per_s: int
    far_latency_ps: int


def activity(
    collective: Collective, size_bytes: int, shape: GroupShape, *, speeds: Speeds, chunks: int
) -> Activity | None:
    """Return the activity of S in `chunks` chunks, or None if there are not two stages.

    Each chunk pays the hops of both stages. The time of the faster stage that the slower one does
    not overlap counts as latency.
    """
    done = Hierarchical().link_bytes(collective, shape)
    if done is None:
        return None
    near_bytes = done.gpu_bytes - done.node_bytes / shape.ranks_per_node
    chunk_ps = Fraction(size_bytes * PICOSECONDS_PER_SECOND, chunks)
    near_moving = near_bytes * chunk_ps / speeds.near_bytes_per_s
    far_moving = done.node_bytes * chunk_ps / speeds.far_bytes_per_s
    near = near_moving + done.near_hops * speeds.near_latency_ps
    far = far_moving + done.far_hops * speeds.far_latency_ps
    total = near + far + (chunks - 1) * max(near, far)
    flowing = max(
        size_bytes * done.gpu_bytes * PICOSECONDS_PER_SECOND / speeds.near_bytes_per_s,
        far_moving * chunks,
    )
    return Activity(
        algorithm=Hierarchical.name,
        protocol=Protocol.SIMPLE,
        latency_ps=max(0, round(total - flowing)),
        gpu_bytes=done.gpu_bytes,
        node_bytes=done.node_bytes,
    )


class Hierarchical(Algorithm):
    """Rings, or direct exchanges, inside nodes and between them, in chunks."""

    name = "hierarchical"

    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return bytes and hops of both stages together, or None if there are not two stages."""
        inner, outer = shape.ranks_per_node, shape.nodes
        if inner.denominator != 1 or inner == 1 or outer == 1:
            return None
        match collective:
            case Collective.ALL_TO_ALL:
                far = Fraction(outer - 1, outer)
                return LinkBytes(
                    gpu_bytes=1 - 1 / inner + far,
                    node_bytes=inner * far,
                    near_hops=1,
                    far_hops=1,
                )
            case Collective.ALL_REDUCE:
                laps = 2
            case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
                laps = 1
            case _:
                return None
        far = Fraction(outer - 1, outer)
        near = 1 - 1 / inner
        return LinkBytes(
            gpu_bytes=laps * (near + far / inner),
            node_bytes=laps * far,
            local_bytes=1 / (inner * outer),
            near_hops=laps * (int(inner) - 1),
            far_hops=laps * (outer - 1),
        )

    def is_considered(self, profile: NetworkProfile, ranks: int) -> bool:
        """Return False: it is used only if forced."""
        del profile, ranks
        return False

    def activity(self, request: Request, profile: NetworkProfile | None) -> Activity | None:
        """Return the activity in chunks, at the fitted or the nominal speed of links."""
        near = far = Fraction(1)
        near_ps, far_ps = request.near_ps, request.far_ps
        if profile is not None:
            crowd = crowding(profile, log2(max(1.0, request.shape.nodes / 2)))
            direct = request.collective is Collective.ALL_TO_ALL
            link = (DIRECT if direct else LINK).of(profile)
            near, far = (
                Fraction(each).limit_denominator(10**6) for each in (link, NIC.of(profile) / crowd)
            )
            near_ps = round(SIMPLE_HOP_S.of(profile) * PICOSECONDS_PER_SECOND)
            far_ps = near_ps + round(FAR_HOP_S.of(profile) * crowd * PICOSECONDS_PER_SECOND)
        speeds = Speeds(
            near_bytes_per_s=int(request.links.gpu * near),
            near_latency_ps=near_ps,
            far_bytes_per_s=int(request.links.node * far),
            far_latency_ps=far_ps,
        )
        found = activity(
            request.collective,
            request.size_bytes,
            request.shape,
            speeds=speeds,
            chunks=request.chunks,
        )
        return found and replace(found, gpu_efficiency=near, nic_efficiency=far)
