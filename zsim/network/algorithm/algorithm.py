"""The base class of algorithms of collectives, with the formula for their time.

The model is that of NCCL's tuner (Hu et al. 2025, "Demystifying NCCL", and its source file
tuning.cc): a base, plus hops times the latency of one, plus bytes over the bandwidth that the
protocol reaches. Three terms are added that measurements show. A pipeline of chunks takes time to
fill, more so with larger chunks, and chunks grow with the message up to a limit: `fill_s` *
sqrt(b / (b + `fill_bytes`)) for b bytes per link. Between nodes, one chunk passes at every hop, for
the time that its bytes need. A rank copies or adds its own shard while it sends nothing, which
matters in small groups. Traffic between nodes takes longer the more nodes there are
(`congestion`).

Formulas accept floats, or arrays of many collectives at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import log2
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Activity, Collective, GroupShape, LinkBytes, Protocol
from zsim.network.algorithm.constant import (
    ADD,
    BASE_S,
    CONGESTION,
    COPY,
    FAR_BASE_S,
    FAR_FILL_BYTES,
    FAR_FILL_S,
    FAR_HOP_S,
    FILL_BYTES,
    FILL_S,
    LAUNCH_S,
    LINK,
    LL,
    LL128,
    LL128_HOP_S,
    LL_HOP_S,
    NIC,
    SIMPLE_HOP_S,
    Constant,
)
from zsim.units import PICOSECONDS_PER_SECOND

Number = TypeVar("Number", float, NDArray[np.float64])

ALL_PROTOCOLS = tuple(Protocol)
ADDING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE})
"""Collectives in which ranks add received data."""

_PARTS_PER_ONE = 10**6  # efficiencies are rounded to a millionth, to keep fractions small


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidths:
    """Nominal bytes per second, per direction: of a GPU's link, and of a node's NICs in use.

    `pair` is the bandwidth between two GPUs of different nodes: of the NICs nearest to a GPU, not
    of all NICs of its node.
    """

    gpu: int
    node: int
    pair: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A collective for which an algorithm computes an activity.

    Attributes:
        size_bytes: S, see `zsim.network.algorithm.activity`.
        near_ps, far_ps: latency from GPU to GPU within a node, and between two nodes, in
            picoseconds. Used only if no constants are known.
        chunks: chunks that pass the stages of a hierarchical algorithm as a pipeline.
    """

    collective: Collective
    size_bytes: int
    shape: GroupShape
    links: Bandwidths
    near_ps: int = 0
    far_ps: int = 0
    chunks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms(Generic[Number]):
    """A collective, or an array of many, in the units of the formula.

    Attributes:
        gpu_s: bytes of each GPU over the nominal bandwidth of its link, in seconds.
        node_s: bytes of each node over the nominal bandwidth of its NICs; 0 within a node.
        copy_s: bytes that a rank only copies, over the same bandwidth as gpu_s; add_s likewise.
        link_bytes: bytes of each GPU.
        ranks: ranks on a node.
        near_hops: sequential hops within nodes, far_hops between nodes.
        far_fills: far_hops, times the bytes that a node sends to others, in S.
        crosses: 1 if it crosses nodes, else 0.
        doublings: binary logarithm of half the number of nodes that it crosses; 0 for up to two.
        own: terms that only one algorithm needs, by name.
    """

    gpu_s: Number
    node_s: Number
    copy_s: Number
    add_s: Number
    link_bytes: Number
    ranks: Number
    near_hops: Number
    far_hops: Number
    far_fills: Number
    crosses: Number
    doublings: Number
    own: Mapping[str, Number] = field(default_factory=dict[str, Number])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing(Generic[Number]):
    """Seconds before bytes flow, and seconds of the bytes on a GPU's link and a node's NICs."""

    latency_s: Number
    gpu_s: Number
    node_s: Number


class Algorithm(ABC):
    """An algorithm by which the ranks of a group execute a collective.

    An algorithm returns its bytes and hops (`link_bytes`). The time follows from the constants of a
    profile by a formula; subclasses can replace its parts.

    Class attributes:
        name: of the algorithm, in scenarios and in the entry point that registers it.
        protocols: the protocols that it can use.
        constants: its constants beyond the common ones.
    """

    name: ClassVar[str]
    protocols: ClassVar[tuple[Protocol, ...]] = (Protocol.SIMPLE,)
    constants: ClassVar[tuple[Constant, ...]] = ()

    @abstractmethod
    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return bytes and hops for a collective, or None if the algorithm cannot execute it."""

    def is_possible(self, profile: NetworkProfile) -> bool:
        """Return True if the hardware supports the algorithm."""
        del profile
        return True

    def is_considered(self, profile: NetworkProfile, ranks: int) -> bool:
        """Return True if the tuner considers it for a group with `ranks` on a node."""
        del ranks
        return self.is_possible(profile)

    def host_s(self, profile: NetworkProfile, request: Request) -> float:
        """Return the seconds that the host needs to launch the collective."""
        del request
        return LAUNCH_S.of(profile)

    def share(self, profile: NetworkProfile) -> float:
        """Return the share of a GPU's link that the simple protocol reaches."""
        return LINK.of(profile)

    def near_hop_s(self, profile: NetworkProfile, protocol: Protocol) -> float:
        """Return the seconds of a hop within a node."""
        return hop_s(profile, protocol)

    def fill_s(self, profile: NetworkProfile, terms: Terms[Number]) -> Number:
        """Return the seconds to fill the pipeline of a large message, within a node."""
        return saturating(terms.link_bytes, FILL_BYTES.of(profile)) * FILL_S.of(profile)

    def link_s(self, profile: NetworkProfile, relative: float, terms: Terms[Number]) -> Number:
        """Return the seconds of the bytes on a GPU's link; `relative` is the protocol's share."""
        return terms.gpu_s / (self.share(profile) * relative)

    def own_terms(self, request: Request, gpu_s: float) -> Mapping[str, float]:
        """Return the terms that only this algorithm needs; `gpu_s` is that of `Terms`."""
        del request, gpu_s
        return {}

    def terms(self, request: Request, done: LinkBytes) -> Terms[float]:
        """Return `request` in the units of the formula; `done` is its result of `link_bytes`."""
        size_bytes, links = request.size_bytes, request.links
        adds = request.collective in ADDING
        local_s = size_bytes * float(done.local_bytes) / links.gpu
        gpu_s = size_bytes * float(done.gpu_bytes) / links.gpu
        return Terms(
            gpu_s=gpu_s,
            node_s=size_bytes * float(done.node_bytes) / links.node,
            copy_s=0.0 if adds else local_s,
            add_s=local_s if adds else 0.0,
            link_bytes=size_bytes * float(done.gpu_bytes),
            ranks=float(request.shape.ranks_per_node),
            near_hops=float(done.near_hops),
            far_hops=float(done.far_hops),
            far_fills=float(done.far_hops * done.node_bytes),
            crosses=float(done.node_bytes > 0),
            doublings=log2(max(1.0, request.shape.nodes / 2)),
            own=self.own_terms(request, gpu_s),
        )

    def timing(
        self, profile: NetworkProfile, protocol: Protocol, terms: Terms[Number]
    ) -> Timing[Number]:
        """Return the timing of `terms` over `protocol`."""
        relative = protocol_share(profile, protocol)
        latency_s = BASE_S.of(profile) + terms.near_hops * self.near_hop_s(profile, protocol)
        crowd = crowding(profile, terms.doublings)
        latency_s = latency_s + terms.far_hops * hop_s(profile, protocol)
        latency_s = latency_s + terms.far_hops * FAR_HOP_S.of(profile) * crowd
        latency_s = latency_s + terms.crosses * FAR_BASE_S.of(profile)
        share = saturating(terms.link_bytes, FAR_FILL_BYTES.of(profile))
        latency_s = latency_s + terms.far_fills * share * FAR_FILL_S.of(profile) * crowd
        if protocol is Protocol.SIMPLE:
            latency_s = latency_s + self.fill_s(profile, terms)
        local_s = terms.copy_s / COPY.of(profile) + terms.add_s / ADD.of(profile)
        return Timing(
            latency_s=latency_s,
            gpu_s=self.link_s(profile, relative, terms) + local_s,
            node_s=terms.node_s / (NIC.of(profile) * relative) * crowd,
        )

    def fastest(
        self, profile: NetworkProfile, request: Request
    ) -> tuple[float, Protocol, Timing[float]] | None:
        """Return seconds, protocol and timing of the fastest protocol; None if not supported."""
        done = self.link_bytes(request.collective, request.shape)
        if done is None:
            return None
        terms = self.terms(request, done)
        best: tuple[float, Protocol, Timing[float]] | None = None
        for protocol in self.protocols:
            took = self.timing(profile, protocol, terms)
            seconds = took.latency_s + max(took.gpu_s, took.node_s)
            if best is None or seconds < best[0]:
                best = seconds, protocol, took
        return best

    def timed(self, request: Request, protocol: Protocol, took: Timing[float]) -> Activity:
        """Return the activity of a collective with the timing `took` over `protocol`."""
        done = self.link_bytes(request.collective, request.shape)
        assert done is not None
        size_bytes, links = request.size_bytes, request.links
        return Activity(
            algorithm=self.name,
            protocol=protocol,
            latency_ps=round(took.latency_s * PICOSECONDS_PER_SECOND),
            gpu_bytes=done.gpu_bytes,
            node_bytes=done.node_bytes,
            gpu_efficiency=_efficiency(size_bytes * done.gpu_bytes / links.gpu, took.gpu_s),
            nic_efficiency=_efficiency(size_bytes * done.node_bytes / links.node, took.node_s),
        )

    def activity(self, request: Request, profile: NetworkProfile | None) -> Activity | None:
        """Return the activity of a collective that is forced to use this algorithm.

        Without a profile, links run at their nominal speed. None if the algorithm cannot execute
        it, or if it equals the backend's plain ring.
        """
        if profile is not None:
            best = self.fastest(profile, request) if self.is_possible(profile) else None
            return None if best is None else self.timed(request, *best[1:])
        done = self.link_bytes(request.collective, request.shape)
        if done is None:
            return None
        return Activity(
            algorithm=self.name,
            protocol=Protocol.SIMPLE,
            latency_ps=done.near_hops * request.near_ps + done.far_hops * request.far_ps,
            gpu_bytes=done.gpu_bytes,
            node_bytes=done.node_bytes,
        )


def hop_s(profile: NetworkProfile, protocol: Protocol) -> float:
    """Return the seconds of a hop from one GPU to another within a node."""
    match protocol:
        case Protocol.LL:
            return LL_HOP_S.of(profile)
        case Protocol.LL128:
            return LL128_HOP_S.of(profile)
        case Protocol.SIMPLE:
            return SIMPLE_HOP_S.of(profile)


def crowding(profile: NetworkProfile, doublings: Number) -> Number:
    """Return the slowdown of traffic between nodes, relative to two nodes."""
    times: Number = pow(2.0, CONGESTION.of(profile) * doublings)
    return times


def protocol_share(profile: NetworkProfile, protocol: Protocol) -> float:
    """Return the bandwidth that a protocol reaches, as a share of that of the simple one."""
    match protocol:
        case Protocol.LL:
            return LL.of(profile)
        case Protocol.LL128:
            return LL128.of(profile)
        case Protocol.SIMPLE:
            return 1.0


def saturating(size: Number, scale: float) -> Number:
    """Return the square root of `size` / (`size` + `scale`), which grows to 1."""
    share: Number = size / (size + scale)
    root: Number = pow(share, 0.5)
    return root


def _efficiency(nominal_s: Fraction, taken_s: float) -> Fraction:
    if not taken_s:
        return Fraction(1)
    parts = round(float(nominal_s) / taken_s * _PARTS_PER_ONE)
    return Fraction(min(_PARTS_PER_ONE, max(1, parts)), _PARTS_PER_ONE)
