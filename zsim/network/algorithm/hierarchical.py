"""Hierarchical: a ring inside each node and rings between nodes, in chunks that follow each other.

An all-gather first gathers between nodes, among ranks of equal number, then inside each node; a
reduce-scatter is the reverse; an all-reduce is one after the other. Each stage is a pipeline of its
own, so with c chunks the slower stage is busy all the time and the faster one adds what its last
(or first) chunk takes. Source: the 2-dimensional ring of Jia et al. 2018, "Highly scalable deep
learning training system", with the pipelining of Cho et al. 2019, "BlueConnect".
"""

from dataclasses import dataclass
from fractions import Fraction

from zsim.network.algorithm.activity import Activity, Algorithm, Collective, Protocol, Shape, Work
from zsim.units import PICOSECONDS_PER_SECOND


def work(collective: Collective, shape: Shape) -> Work | None:
    """What both stages do together, or None where there are not two stages."""
    inner, outer = shape.ranks_per_node, shape.nodes
    if inner.denominator != 1 or inner == 1 or outer == 1:
        return None
    match collective:
        case Collective.ALL_REDUCE:
            laps = 2
        case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
            laps = 1
        case _:
            return None
    far = Fraction(outer - 1, outer)
    near = 1 - 1 / inner
    return Work(
        gpu_bytes=laps * (near + far / inner),
        node_bytes=laps * far,
        local_bytes=1 / (inner * outer),
        near_hops=laps * (int(inner) - 1),
        far_hops=laps * (outer - 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What the stages run on: bytes per second and latency of a way from GPU to GPU.

    `far_bytes_per_s` is that of all NICs of a node that the group uses.
    """

    near_bytes_per_s: int
    near_latency_ps: int
    far_bytes_per_s: int
    far_latency_ps: int


def activity(
    collective: Collective, size_bytes: int, shape: Shape, *, speeds: Speeds, chunks: int
) -> Activity | None:
    """S = `size_bytes` in `chunks` chunks, or None where there are not two stages.

    Each chunk pays the hops of both stages. What remains of the faster stage when the slower one
    is busy all the time is latency here.
    """
    done = work(collective, shape)
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
        algorithm=Algorithm.HIERARCHICAL,
        protocol=Protocol.SIMPLE,
        latency_ps=max(0, round(total - flowing)),
        gpu_bytes=done.gpu_bytes,
        node_bytes=done.node_bytes,
    )
