"""Which algorithm and protocol a collective takes: the fastest as predicted, as NCCL's tuner does.

NCCL compares algorithms by latency plus bytes over bandwidth and takes the least (its source file
tuning.cc, and Hu et al. 2025, "Demystifying NCCL", describe the model). In-switch reduction is an
exception, which NCCL rates by a bandwidth that does not depend on the group: it is taken from some
group size on (`nvls_choice`), and then in preference to rings and trees only where it is faster.
The hierarchical algorithm is none of NCCL's: it is taken where it is forced.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import log2

from zsim.cluster.profile.network import NetworkProfile, Terms, Timing, timing
from zsim.network.algorithm import direct, hierarchical, nvls, ring, tree
from zsim.network.algorithm.activity import Activity, Algorithm, Collective, Protocol, Shape, Work
from zsim.units import PICOSECONDS_PER_SECOND

_ALL = tuple(Protocol)
_SIMPLE = (Protocol.SIMPLE,)
_PROTOCOLS = {
    Algorithm.RING: _ALL,
    Algorithm.TREE: _ALL,
    Algorithm.NVLS: _SIMPLE,
    Algorithm.HIERARCHICAL: _SIMPLE,
    Algorithm.DIRECT: _SIMPLE,
}
_WORK = {
    Algorithm.RING: ring.work,
    Algorithm.TREE: tree.work,
    Algorithm.NVLS: nvls.work,
    Algorithm.HIERARCHICAL: hierarchical.work,
    Algorithm.DIRECT: direct.work,
}
_PARTS_PER_ONE = 10**6  # efficiencies are rounded to a millionth, to keep fractions small


class NoAlgorithmError(ValueError):
    """The algorithm that was asked for cannot do the collective in this group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Nominal bytes per second, per direction: of a GPU's link, and of a node's NICs in use."""

    gpu: int
    node: int


@lru_cache(maxsize=4096)
def work(algorithm: Algorithm, collective: Collective, shape: Shape) -> Work | None:
    """What `algorithm` does for the collective, or None if it cannot."""
    return _WORK[algorithm](collective, shape)


def candidates(collective: Collective, shape: Shape) -> Iterator[tuple[Algorithm, Protocol, Work]]:
    """Every way to do the collective."""
    for algorithm, protocols in _PROTOCOLS.items():
        done = work(algorithm, collective, shape)
        if done is not None:
            for protocol in protocols:
                yield algorithm, protocol, done


def terms(
    collective: Collective, size_bytes: int, shape: Shape, *, done: Work, links: Bandwidths
) -> Terms[float]:
    """`done` for S = `size_bytes` in `shape`, in the units of the formula."""
    adds = collective in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE}
    local_s = size_bytes * float(done.local_bytes) / links.gpu
    gpu_s = size_bytes * float(done.gpu_bytes) / links.gpu
    channels = direct.channels(collective, size_bytes, shape)
    return Terms(
        gpu_s=gpu_s,
        node_s=size_bytes * float(done.node_bytes) / links.node,
        copy_s=0.0 if adds else local_s,
        add_s=local_s if adds else 0.0,
        link_bytes=size_bytes * float(done.gpu_bytes),
        channel_s=gpu_s / channels if channels else 0.0,
        doublings=log2((direct.peers(collective, shape) + 1) / 2) if channels else 0.0,
        ranks=float(shape.ranks_per_node),
        near_hops=float(done.near_hops),
        far_hops=float(done.far_hops),
        far_fills=float(done.far_hops * done.node_bytes),
        crosses=float(done.node_bytes > 0),
    )


def choose(
    profile: NetworkProfile,
    collective: Collective,
    size_bytes: int,
    shape: Shape,
    *,
    links: Bandwidths,
    forced: Algorithm | None = None,
) -> Activity:
    """The activity that the collective is: of the fastest algorithm and protocol, or `forced`.

    Raises:
        NoAlgorithmError: `forced` cannot do it.
    """
    if shape.ranks == 1 or size_bytes == 0:
        return Activity(
            algorithm=forced or Algorithm.RING,
            protocol=Protocol.SIMPLE,
            latency_ps=0,
            gpu_bytes=Fraction(0),
            node_bytes=Fraction(0),
        )
    per_node = ranks_on_a_node(shape)
    best: tuple[float, Algorithm, Protocol, Work, Timing[float]] | None = None
    for algorithm, protocol, done in candidates(collective, shape):
        if forced is None:
            wanted = profile.chooses(algorithm, per_node)
        else:
            wanted = algorithm is forced and profile.can(algorithm)
        if not wanted:
            continue
        took = timing(
            profile,
            algorithm,
            protocol,
            terms(collective, size_bytes, shape, done=done, links=links),
        )
        seconds = took.latency_s + max(took.gpu_s, took.node_s)
        if best is None or seconds < best[0]:
            best = seconds, algorithm, protocol, done, took
    if best is None:
        raise NoAlgorithmError(
            f"{forced} cannot do {collective} over {shape.ranks} ranks on {shape.nodes} nodes"
        )
    _, algorithm, protocol, done, took = best
    node_s = size_bytes * done.node_bytes / links.node
    return Activity(
        algorithm=algorithm,
        protocol=protocol,
        latency_ps=round(took.latency_s * PICOSECONDS_PER_SECOND),
        gpu_bytes=done.gpu_bytes,
        node_bytes=done.node_bytes,
        gpu_efficiency=_share(size_bytes * done.gpu_bytes / links.gpu, took.gpu_s),
        nic_efficiency=_share(node_s, took.node_s),
    )


def _share(nominal_s: Fraction, taken_s: float) -> Fraction:
    if not taken_s:
        return Fraction(1)
    parts = round(float(nominal_s) / taken_s * _PARTS_PER_ONE)
    return Fraction(min(_PARTS_PER_ONE, max(1, parts)), _PARTS_PER_ONE)


def alone_s(
    profile: NetworkProfile,
    collective: Collective,
    size_bytes: int,
    shape: Shape,
    *,
    links: Bandwidths,
) -> float:
    """Seconds per collective in a benchmark's loop, on links to themselves.

    The host launches one after the other, so it bounds what the device could do faster.
    """
    chosen = choose(profile, collective, size_bytes, shape, links=links)
    device_ps = chosen.time_ps(size_bytes, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node)
    return max(device_ps / PICOSECONDS_PER_SECOND, host_s(profile, collective, shape))


def host_s(profile: NetworkProfile, collective: Collective, shape: Shape) -> float:
    """Seconds that the host needs to launch the collective."""
    return profile.launch_s + direct.peers(collective, shape) * profile.pair_s


def ranks_on_a_node(shape: Shape) -> int:
    """Ranks on the fullest node, as far as the shape knows."""
    return -(-shape.ranks // shape.nodes)
