"""The time of a collective by the formula that docs/network.md describes, written down once more.

For nodes of eight GPUs. It shares no code with zsim: rows made here say whether a fit finds the
constants that made them. `by` has the constants of a profile, by name.
"""

from collections.abc import Iterator, Mapping
from math import inf, log2, sqrt

LINK, NICS = 450e9, 400e9
NODE = 8

ADDING = ("all_reduce", "reduce_scatter", "reduce")
DIRECT = ("all_to_all", "send_receive")


def seconds(by: Mapping[str, float], collective: str, ranks: int, size: float) -> float:
    """Return what one of many collectives in a row takes: its fastest way, or the host's time."""
    nodes = -(-ranks // NODE)
    if collective in DIRECT:
        peers = 1 if collective == "send_receive" else ranks - 1
        host = by["launch_s"] + peers * by["pair_s"]
        return max(host, _direct(by, collective, ranks, nodes, size))
    ways = [_ring(by, protocol, collective, ranks, nodes, size) for protocol in _protocols(by)]
    if collective == "all_reduce":
        ways += [_tree(by, protocol, ranks, nodes, size) for protocol in _protocols(by)]
        ways.append(_switch(by, ranks, nodes, size))
    return max(by["launch_s"], min(ways))


def _protocols(by: Mapping[str, float]) -> Iterator[tuple[float, float, bool]]:
    """Yield each protocol: seconds a hop, share of bandwidth, whether chunks fill pipes."""
    yield by["ll_hop_s"], by["ll"], False
    yield by["ll128_hop_s"], by["ll128"], False
    yield by["simple_hop_s"], 1.0, True


def _crowd(by: Mapping[str, float], nodes: int) -> float:
    """Return how many times as long crossing takes as between two nodes."""
    grown: float = max(1.0, nodes / 2) ** by["congestion"]
    return grown


def _fill(by: Mapping[str, float], kind: str, size: float) -> float:
    return by[f"{kind}fill_s"] * sqrt(size / (size + by[f"{kind}fill_bytes"]))


def _ring(
    by: Mapping[str, float],
    protocol: tuple[float, float, bool],
    collective: str,
    ranks: int,
    nodes: int,
    size: float,
) -> float:
    hop, share, chunks = protocol
    laps = 2 if collective == "all_reduce" else 1
    chain = collective in ("broadcast", "reduce")
    sent = size if chain else laps * size * (ranks - 1) / ranks
    own = 0.0 if chain else size / ranks / by["add" if collective in ADDING else "copy"]
    far = 0 if nodes == 1 else min(nodes, ranks - 1)
    crowd = _crowd(by, nodes)
    latency = by["base_s"] + laps * (ranks - 1) * hop + laps * far * by["far_hop_s"] * crowd
    if far:
        latency += by["far_base_s"]
        latency += laps * far * (sent / size) * _fill(by, "far_", sent) * crowd
    if chunks:
        latency += _fill(by, "", sent)
    within = sent / LINK / by["link"] / share + own / LINK
    return latency + max(within, sent / NICS / by["nic"] / share * crowd if far else 0.0)


def _trees(nodes: int) -> tuple[int, int]:
    """Return bytes through the NICs of a node for one of the tensor, and hops up and down."""
    return (0, 0) if nodes == 1 else (1 if nodes == 2 else 2, 2 * (nodes - 1).bit_length())


def _tree(
    by: Mapping[str, float],
    protocol: tuple[float, float, bool],
    ranks: int,
    nodes: int,
    size: float,
) -> float:
    hop, share, chunks = protocol
    per_node = ranks / nodes
    passed, far = _trees(nodes)
    chain = min(ranks, NODE) - 1
    sent = size * max(min(chain, 2), passed / per_node)
    crowd = _crowd(by, nodes)
    latency = by["base_s"] + (2 * chain + far) * hop + far * by["far_hop_s"] * crowd
    if far:
        latency += by["far_base_s"] + far * passed * _fill(by, "far_", sent) * crowd
    if chunks:
        latency += _fill(by, "", sent)
    within = sent / LINK / (by["link"] * by["tree"]) / share
    return latency + max(within, passed * size / NICS / by["nic"] / share * crowd)


def _switch(by: Mapping[str, float], ranks: int, nodes: int, size: float) -> float:
    here = min(ranks, NODE)
    if not by["nvls"] or not 1 < here < by["nvls_choice"] * 2 * (here - 1) or here <= 2:
        return inf
    passed, far = _trees(nodes)
    sent = size * (1 + nodes / ranks)
    latency = by["base_s"] + 2 * by["nvls_hop_s"]
    crowd = _crowd(by, nodes)
    latency += far * (by["simple_hop_s"] + by["far_hop_s"] * crowd)
    latency += by["far_base_s"] + far * passed * _fill(by, "far_", sent) * crowd if far else 0.0
    latency += _fill(by, "nvls_", sent) * ranks / nodes
    return latency + max(sent / LINK / by["nvls"], passed * size / NICS / by["nic"] * crowd)


def _direct(by: Mapping[str, float], collective: str, ranks: int, nodes: int, size: float) -> float:
    single = collective == "send_receive"
    peers, part = (1, size) if single else (ranks - 1, -(-size // ranks))
    sent = size if single else size * peers / ranks
    outside = size if single else size * (ranks - ranks / nodes) / nodes
    nics, crowd = (NICS / NODE, 1.0) if single else (NICS, _crowd(by, nodes))
    each = 1 << max(0, int(log2(32 / ranks)))
    while each < 32 and part > each * (2**24 if nodes == 1 else 2**17):
        each *= 2
    hop = by["simple_hop_s"] + (by["far_hop_s"] * crowd if nodes > 1 else 0.0)
    latency = by["base_s"] + hop + _fill(by, "direct_", sent)
    if nodes > 1:
        latency += by["far_base_s"] + outside / size * _fill(by, "far_", sent) * crowd
    link = sent / LINK / by["direct"] * (1 + by["spread"] * log2((peers + 1) / 2))
    channel = sent / LINK / min(32, each * peers) / by["channel"]
    both: float = (link**8 + channel**8) ** (1 / 8)
    return latency + max(both, outside / nics / by["nic"] * crowd if nodes > 1 else 0.0)
