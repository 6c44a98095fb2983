"""Direct exchange: every rank sends to each peer directly, as in all-to-all and send/receive.

A send to few peers is slow if it uses few channels; each channel is a block of threads.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import log2

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Collective, GroupShape, LinkBytes
from zsim.network.algorithm.algorithm import Algorithm, Number, Request, Terms, saturating
from zsim.network.algorithm.constant import LAUNCH_S, Constant

PAIR_S = Constant(name="pair_s")
"""Additional host time for each pair of a send and a receive in a collective."""
DIRECT = Constant(name="direct", is_share=True)
"""Share of a GPU's link that direct exchange reaches."""
CHANNEL = Constant(name="channel", is_share=True)
"""Share of the link that one channel reaches."""
SPREAD = Constant(name="spread")
"""Part of `direct` that is lost with each doubling of the group."""
FILL_S = Constant(name="direct_fill_s")
"""Time to fill the pipeline of large messages."""
FILL_BYTES = Constant(name="direct_fill_bytes")
"""Scale, in bytes per link, at which the fill time saturates."""

SMOOTH = 8.0  # two similar limits combine: the sum of their 8th powers

CHANNELS = 32
"""Channels of one GPU for sends and receives: NCCL rounds the links of a GPU up to a power of 2."""

NEAR_PART_BYTES, FAR_PART_BYTES = 16 * 2**20, 128 * 2**10
"""Maximum bytes of a channel for a peer, within and between nodes, before channels are added.

NCCL's scheduleP2pTasksToPlan and calcP2pChannelCount (src/enqueue.cc) double the channels of a
peer while each carries more than 32 chunks of 512 KiB over NVLink, or one of 128 KiB over a net.
"""


def peers(collective: Collective, shape: GroupShape) -> int:
    """Return the number of peers with which a rank exchanges directly; 0 if none."""
    match collective:
        case Collective.ALL_TO_ALL:
            return shape.ranks - 1
        case Collective.SEND_RECEIVE:
            return min(1, shape.ranks - 1)
        case _:
            return 0


def channels(collective: Collective, size_bytes: int, shape: GroupShape) -> int:
    """Return the channels that carry S = `size_bytes` for one GPU; 0 if nothing is direct.

    Channels are first divided evenly among all ranks of the group, whether they exchange or not.
    """
    count = peers(collective, shape)
    if not count:
        return 0
    each = CHANNELS
    while each > 1 and each * shape.ranks > CHANNELS:
        each //= 2
    part = size_bytes if collective is Collective.SEND_RECEIVE else -(-size_bytes // shape.ranks)
    most = NEAR_PART_BYTES if shape.nodes == 1 else FAR_PART_BYTES
    while each < CHANNELS and part > most * each:
        each *= 2
    return min(CHANNELS, each * count)


class Direct(Algorithm):
    """Direct exchange between all pairs of ranks that exchange data."""

    name = "direct"
    constants = (PAIR_S, DIRECT, CHANNEL, SPREAD, FILL_S, FILL_BYTES)

    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return bytes and hops of an all-to-all or a send/receive; None for others.

        Each rank of a send/receive sends S to the next one, so a node sends S and receives S.
        """
        if shape.ranks == 1:
            return LinkBytes(gpu_bytes=Fraction(0))
        crossing = int(shape.nodes > 1)
        near = 1 - crossing
        match collective:
            case Collective.ALL_TO_ALL:
                peers = shape.ranks - 1
                outside = (shape.ranks - shape.ranks_per_node) / shape.ranks
                return LinkBytes(
                    gpu_bytes=Fraction(peers, shape.ranks),
                    node_bytes=shape.ranks_per_node * outside,
                    near_hops=near,
                    far_hops=crossing,
                )
            case Collective.SEND_RECEIVE:
                return LinkBytes(
                    gpu_bytes=Fraction(1),
                    node_bytes=Fraction(crossing),
                    near_hops=near,
                    far_hops=crossing,
                )
            case _:
                return None

    def host_s(self, profile: NetworkProfile, request: Request) -> float:
        """Return the seconds that the host needs, which grow with the peers."""
        count = peers(request.collective, request.shape)
        return LAUNCH_S.of(profile) + count * PAIR_S.of(profile)

    def share(self, profile: NetworkProfile) -> float:
        """Return the share of a GPU's link that a pair of ranks reaches."""
        return DIRECT.of(profile)

    def terms(self, request: Request, done: LinkBytes) -> Terms[float]:
        """Return `request` in the units of the formula; a pair uses the NICs nearest to its GPUs.

        A send/receive does not wait for the slowest of many pairs, so it has no congestion.
        """
        found = super().terms(request, done)
        if request.collective is not Collective.SEND_RECEIVE:
            return found
        return replace(
            found,
            node_s=request.size_bytes * float(done.node_bytes) / request.links.pair,
            doublings=0.0,
        )

    def own_terms(self, request: Request, gpu_s: float) -> Mapping[str, float]:
        """Return the time per channel, and the doublings from a pair to all exchanging ranks."""
        collective, shape = request.collective, request.shape
        count = channels(collective, request.size_bytes, shape)
        return {
            "channel_s": gpu_s / count if count else 0.0,
            "doublings": log2((peers(collective, shape) + 1) / 2) if count else 0.0,
        }

    def link_s(self, profile: NetworkProfile, relative: float, terms: Terms[Number]) -> Number:
        """Return the seconds of the bytes under the limits of the link and of its channels."""
        spread = 1 + SPREAD.of(profile) * terms.own["doublings"]
        link_s: Number = terms.gpu_s / (self.share(profile) * relative) * spread
        return both(link_s, terms.own["channel_s"] / CHANNEL.of(profile))

    def fill_s(self, profile: NetworkProfile, terms: Terms[Number]) -> Number:
        """Return the seconds to fill the pipeline of a large message."""
        return saturating(terms.link_bytes, FILL_BYTES.of(profile)) * FILL_S.of(profile)


def both(one: Number, other: Number) -> Number:
    """Return the time under two limits: the longer one, and more if they are similar."""
    first: Number = pow(one, SMOOTH)
    second: Number = pow(other, SMOOTH)
    root: Number = pow(first + second, 1 / SMOOTH)
    return root
