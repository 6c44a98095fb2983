"""What a collective costs on one kind of hardware: the constants, and the formula that they are in.

The model is that of NCCL's tuner: a base, plus hops times the latency of one, plus bytes over the
bandwidth that the protocol reaches. Three terms are added that measurements show. A pipeline of
chunks takes time to fill, more so with larger chunks, and chunks grow with the message up to a
limit: `fill` * sqrt(b / (b + `fill_bytes`)) for b bytes per link. In a switch that reduces, one
chunk of every owner passes before the first is done; between nodes one at every hop, as long as the
bytes need that cross it. A rank copies or adds its own shard while it sends nothing, which counts
in small groups. And a send to few peers is slow with few channels, each a block of threads.

Constants are made by `zsim calibrate` alone. Formulas take floats, or arrays of many rows at once.
"""

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from zsim.network.algorithm.activity import Algorithm, Protocol

Number = TypeVar("Number", float, NDArray[np.float64])


class ProfileError(ValueError):
    """Constants that cannot be; the message starts with the name of the constant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkProfile:
    """Fitted constants of one kind of hardware. Times in seconds, shares of nominal bandwidth.

    Attributes:
        launch_s: the host's time for one collective: back to back, none takes less.
        pair_s: what each pair of a send and a receive in a direct exchange adds to it.
        base_s: start and end of a collective on the device.
        ll_hop_s: from a GPU to the next within a node, by protocol; nvls_hop_s through the switch
            that reduces, which all GPUs wait for.
        far_base_s: what crossing nodes costs once, and far_hop_s at each hop, on top of a near one.
        link: share of a GPU's link that a ring with the simple protocol reaches.
        ll: share of that which the LL protocol reaches; ll128 and tree likewise.
        direct: share of the link that direct exchange reaches.
        channel: share of the link that one channel of it reaches.
        spread: what each doubling of the group takes from direct, as a share of it.
        nvls: share that in-switch reduction reaches; 0 where the switch cannot.
        nvls_choice: NVLS is taken in groups of n where n / (2 (n - 1)) is below this.
        nic: share of the NICs' bandwidth.
        copy: speed of a local copy of a rank's own shard, in bandwidths of the link; add likewise.
        fill_s: time to fill the pipeline of large messages, and its scale in bytes per link, for
            rings and trees; with nvls_ for each rank of a node, with direct_ for those, and with
            far_ on top for each hop between nodes and S that a node passes on.
    """

    launch_s: float
    pair_s: float
    base_s: float
    ll_hop_s: float
    ll128_hop_s: float
    simple_hop_s: float
    nvls_hop_s: float
    far_base_s: float
    far_hop_s: float
    link: float
    ll: float
    ll128: float
    tree: float
    direct: float
    channel: float
    spread: float
    nvls: float
    nvls_choice: float
    nic: float
    copy: float
    add: float
    fill_s: float
    fill_bytes: float
    nvls_fill_s: float
    nvls_fill_bytes: float
    direct_fill_s: float
    direct_fill_bytes: float
    far_fill_s: float
    far_fill_bytes: float

    def __post_init__(self) -> None:
        for name in NAMES:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ProfileError(f"{name}: {value!r} must be a number")
            if not 0 <= value < float("inf") or (value == 0 and name != "nvls"):
                raise ProfileError(f"{name}: {value} must be more than 0")
            if name in SHARES and value > 1:
                raise ProfileError(f"{name}: {value} must be at most 1, it is a share")

    def can(self, algorithm: Algorithm) -> bool:
        """Whether this hardware has what `algorithm` needs: a switch that reduces, for NVLS."""
        return algorithm is not Algorithm.NVLS or self.nvls > 0

    def chooses(self, algorithm: Algorithm, ranks: int) -> bool:
        """Whether NCCL considers `algorithm` here in a group with `ranks` on a node."""
        match algorithm:
            case Algorithm.HIERARCHICAL:
                return False
            case Algorithm.NVLS:
                return self.nvls > 0 and 1 < ranks < self.nvls_choice * 2 * (ranks - 1)
            case _:
                return True


SHARES = frozenset({"link", "ll", "ll128", "tree", "direct", "channel", "nvls", "nic"})
SMOOTH = 8.0  # of two limits near each other both slow: the sum of their 8th powers
NAMES = tuple(field.name for field in fields(NetworkProfile))


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(Generic[Number]):
    """A collective, or many, in the units of the formula.

    Attributes:
        gpu_s: bytes of each GPU over the nominal bandwidth of its link, in seconds.
        node_s: bytes of each node over the nominal bandwidth of its NICs; 0 within a node.
        copy_s: bytes that a rank only copies, over the same bandwidth as gpu_s; add_s likewise.
        link_bytes: bytes of each GPU.
        channel_s: gpu_s over the channels that carry it; 0 if channels are no limit.
        doublings: of a pair of ranks to those that exchange directly; 0 if none do.
        ranks: ranks on a node.
        near_hops: hops within nodes, far_hops between nodes, one after the other.
        far_fills: far_hops, times what a node sends to others, in S.
        crosses: 1 if it crosses nodes, else 0.
    """

    gpu_s: Number
    node_s: Number
    copy_s: Number
    add_s: Number
    link_bytes: Number
    channel_s: Number
    doublings: Number
    ranks: Number
    near_hops: Number
    far_hops: Number
    far_fills: Number
    crosses: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Generic[Number]):
    """Seconds before bytes flow, and that they then need on a GPU's link and a node's NICs."""

    latency_s: Number
    gpu_s: Number
    node_s: Number


def timing(
    profile: NetworkProfile, algorithm: Algorithm, protocol: Protocol, terms: Terms[Number]
) -> Timing[Number]:
    """What `terms` take with `algorithm` over `protocol`."""
    share = _share(profile, algorithm)
    match protocol:
        case Protocol.LL:
            hop_s, relative = profile.ll_hop_s, profile.ll
        case Protocol.LL128:
            hop_s, relative = profile.ll128_hop_s, profile.ll128
        case Protocol.SIMPLE:
            hop_s, relative = profile.simple_hop_s, 1.0
    near_hop_s = profile.nvls_hop_s if algorithm is Algorithm.NVLS else hop_s
    latency_s = profile.base_s + terms.near_hops * near_hop_s
    latency_s = latency_s + terms.far_hops * (hop_s + profile.far_hop_s)
    latency_s = latency_s + terms.crosses * profile.far_base_s
    if protocol is Protocol.SIMPLE:
        latency_s = latency_s + _fill_s(profile, algorithm, terms)
    local_s = terms.copy_s / profile.copy + terms.add_s / profile.add
    link_s = terms.gpu_s / (share * relative) * (1 + profile.spread * terms.doublings)
    return Timing(
        latency_s=latency_s,
        gpu_s=_both(link_s, terms.channel_s / profile.channel) + local_s,
        node_s=terms.node_s / (profile.nic * relative),
    )


def _share(profile: NetworkProfile, algorithm: Algorithm) -> float:
    match algorithm:
        case Algorithm.RING | Algorithm.HIERARCHICAL:
            return profile.link
        case Algorithm.TREE:
            return profile.link * profile.tree
        case Algorithm.NVLS:
            return profile.nvls
        case Algorithm.DIRECT:
            return profile.direct


def _both(one: Number, other: Number) -> Number:
    """Time under two limits: the longer one, and more where they are near each other."""
    first: Number = pow(one, SMOOTH)
    second: Number = pow(other, SMOOTH)
    root: Number = pow(first + second, 1 / SMOOTH)
    return root


def _fill_s(profile: NetworkProfile, algorithm: Algorithm, terms: Terms[Number]) -> Number:
    size = terms.link_bytes
    match algorithm:
        case Algorithm.RING | Algorithm.HIERARCHICAL | Algorithm.TREE:
            near_s = _saturating(size, profile.fill_bytes) * profile.fill_s
        case Algorithm.NVLS:
            near_s = _saturating(size, profile.nvls_fill_bytes) * profile.nvls_fill_s * terms.ranks
        case Algorithm.DIRECT:
            near_s = _saturating(size, profile.direct_fill_bytes) * profile.direct_fill_s
    far_s = _saturating(size, profile.far_fill_bytes) * profile.far_fill_s
    return near_s + terms.far_fills * far_s


def _saturating(size: Number, scale: float) -> Number:
    share: Number = size / (size + scale)
    root: Number = pow(share, 0.5)
    return root
