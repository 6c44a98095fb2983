"""The choice of algorithm and protocol: the fastest predicted one, as in NCCL's tuner.

NCCL compares algorithms by latency plus bytes over bandwidth and chooses the fastest (see its
source file tuning.cc; Hu et al. 2025, "Demystifying NCCL", describe the model).
"""

from fractions import Fraction

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Activity, Collective, GroupShape, Protocol
from zsim.network.algorithm.algorithm import Algorithm, Bandwidths, Request, Timing
from zsim.network.algorithm.installed_algorithms import algorithms
from zsim.units import PICOSECONDS_PER_SECOND


class NoAlgorithmError(ValueError):
    """The forced algorithm cannot execute the collective in this group."""


def choose(
    profile: NetworkProfile,
    collective: Collective,
    size_bytes: int,
    shape: GroupShape,
    *,
    links: Bandwidths,
    forced: str | None = None,
) -> Activity:
    """Return the activity of a collective with the fastest algorithm, or with `forced`.

    Raises:
        NoAlgorithmError: `forced` cannot execute it.
    """
    if shape.ranks == 1 or size_bytes == 0:
        return Activity(
            algorithm=forced or first_able(collective, shape),
            protocol=Protocol.SIMPLE,
            latency_ps=0,
            gpu_bytes=Fraction(0),
            node_bytes=Fraction(0),
        )
    request = Request(collective=collective, size_bytes=size_bytes, shape=shape, links=links)
    per_node = ranks_on_a_node(shape)
    best: tuple[float, Protocol, Timing[float]] | None = None
    chosen: Algorithm | None = None
    for algorithm in algorithms().values():
        if forced is None:
            wanted = algorithm.is_considered(profile, per_node)
        else:
            wanted = algorithm.name == forced and algorithm.is_possible(profile)
        found = algorithm.fastest(profile, request) if wanted else None
        if found is not None and (best is None or found[0] < best[0]):
            best, chosen = found, algorithm
    if best is None or chosen is None:
        raise NoAlgorithmError(
            f"{forced} cannot do {collective} over {shape.ranks} ranks on {shape.nodes} nodes"
        )
    return chosen.timed(request, *best[1:])


def first_able(collective: Collective, shape: GroupShape) -> str:
    """Return the first algorithm that supports the collective; a ring if it does."""
    return next(n for n, each in algorithms().items() if each.link_bytes(collective, shape))


def alone_s(
    profile: NetworkProfile,
    collective: Collective,
    size_bytes: int,
    shape: GroupShape,
    *,
    links: Bandwidths,
) -> float:
    """Return the seconds per collective in a benchmark's loop, without other traffic.

    The host launches collectives in sequence, so its launch time is a lower bound.
    """
    chosen = choose(profile, collective, size_bytes, shape, links=links)
    device_ps = chosen.time_ps(size_bytes, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node)
    request = Request(collective=collective, size_bytes=size_bytes, shape=shape, links=links)
    host_s = algorithms()[chosen.algorithm].host_s(profile, request)
    return max(device_ps / PICOSECONDS_PER_SECOND, host_s)


def least_link_s(
    profile: NetworkProfile,
    collective: Collective,
    size_bytes: int,
    shape: GroupShape,
    *,
    links: Bandwidths,
) -> tuple[float, float]:
    """Return lower bounds over all algorithms: seconds on a GPU's link and on a node's NICs.

    Neither includes the latency before bytes flow. The bound also holds per collective for several
    collectives of `size_bytes` together.
    """
    request = Request(collective=collective, size_bytes=size_bytes, shape=shape, links=links)
    per_node = ranks_on_a_node(shape)
    found: list[tuple[float, float]] = []
    for algorithm in algorithms().values():
        done = algorithm.link_bytes(collective, shape)
        if done is None or not algorithm.is_considered(profile, per_node):
            continue
        terms = algorithm.terms(request, done)
        for protocol in algorithm.protocols:
            took = algorithm.timing(profile, protocol, terms)
            found.append((took.gpu_s, took.node_s))
    return min(near for near, _ in found), min(far for _, far in found)


def ranks_on_a_node(shape: GroupShape) -> int:
    """Return the ranks on the fullest node, assuming an even distribution."""
    return -(-shape.ranks // shape.nodes)
