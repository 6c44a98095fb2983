"""Time of a library's exchange of token rows among expert ranks: DeepEP and HybridEP.

With T tokens on each of N ranks, a token goes once to each of `hit(nodes)` nodes on which it has
experts, over the NICs of its rail, and from there to each of `hit(N)` GPUs. So the NICs of a node
with m ranks carry m T hit(nodes) (n - 1) / n rows, and NVLink of a GPU T hit(N) (m - 1) / m. The
kernel is also limited by its multiprocessors: each row that a GPU receives, or passes on, takes one
of them for a fixed time, and its bytes for a time at the rate of one. Rows go back on the same ways
and are added in each node ("combine").

Constants of DeepEP V1 are fitted to its rows on B200, those of HybridEP to its rows on B200 and
H100, of one publication: README_Hybrid-EP.md of deepseek-ai/DeepEP at 94a9f8f (branch hybrid-ep),
tables "B200 Platform" and "H100 Platform, HybridEP". All other published rows judge them
(`zsim validate network`). Shares of NICs and congestion are those of the cluster's profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from zsim.cluster.profile.network import NetworkProfile
from zsim.model.expert_transport import ExpertTransport
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths, crowding
from zsim.network.algorithm.constant import NIC
from zsim.network.algorithm.direct import SPREAD, both
from zsim.network.tuner import choose
from zsim.strategy.execution import DispatchLibrary
from zsim.units import PICOSECONDS_PER_SECOND

FITTED_RANKS = 8
"""Ranks of an NVLink domain in the fitted rows; in larger ones links reach less (`spread`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryConstants:
    """Constants of a library.

    Attributes:
        start_s: from the start of the kernel until rows flow, and its end.
        call_s: additional time of a call from a framework.
        plan_s: of the kernels that count rows, once for all exchanges of a forward and backward.
        gathers_map: ranks first gather which expert each token goes to, a byte for each pair.
        row_s: time of a row on a multiprocessor, whatever its size.
        sent_bytes_per_s, returned_bytes_per_s: rate of a multiprocessor that sends rows to
            experts, and that adds returned rows.
        sent_link, returned_link: shares of a GPU's link.
        relay: rows that count as much as one row between nodes.
    """

    start_s: float
    call_s: float
    plan_s: float
    gathers_map: bool
    row_s: float
    sent_bytes_per_s: float
    returned_bytes_per_s: float
    sent_link: float
    returned_link: float
    relay: float


# DeepEP counts rows in `get_dispatch_layout` and `notify_dispatch`, which its bandwidths leave out:
# 39 and 35 us in public profiles of training. Its publication times calls from PyTorch, so that
# `start_s` includes them.
LIBRARIES: Mapping[DispatchLibrary, LibraryConstants] = {
    DispatchLibrary.DEEPEP: LibraryConstants(
        start_s=65.2e-6,
        call_s=0.0,
        plan_s=74e-6,
        gathers_map=False,
        row_s=249e-9,
        sent_bytes_per_s=39.6e9,
        returned_bytes_per_s=29.6e9,
        sent_link=0.729,
        returned_link=0.645,
        relay=1.0,
    ),
    DispatchLibrary.HYBRIDEP: LibraryConstants(
        start_s=106e-6,
        call_s=65.8e-6,
        plan_s=0.0,
        gathers_map=True,
        row_s=73.2e-9,
        sent_bytes_per_s=103.8e9,
        returned_bytes_per_s=106.4e9,
        sent_link=0.95,
        returned_link=0.886,
        relay=4.35,
    ),
}


class SentTokens(NamedTuple):
    """Rows that each rank sends: their number, before copies, and the bytes of each."""

    tokens: float
    row_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossedRows:
    """Rows of a library's exchange.

    Attributes:
        received: rows that a GPU receives, also from itself.
        near: rows that NVLink of a GPU carries in each direction.
        far: rows that the NICs of a GPU carry in each direction.
    """

    received: float
    near: float
    far: float


def crossed_rows(transport: ExpertTransport, tokens: float, shape: GroupShape) -> CrossedRows:
    """Return the expected rows on the links of a GPU, with `tokens` on each rank."""
    received = tokens * transport.choice.places(shape.ranks)
    per_node = float(shape.ranks_per_node)
    far = 0.0
    if shape.nodes > 1:
        far = tokens * transport.choice.places(shape.nodes) * (shape.nodes - 1) / shape.nodes
    return CrossedRows(received=received, near=received * (per_node - 1) / per_node, far=far)


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTiming:
    """Seconds before rows flow, and seconds of the rows on a GPU and on the NICs of a node.

    `gpu_s` includes the limit of multiprocessors.
    """

    latency_s: float
    gpu_s: float
    node_s: float

    @property
    def seconds(self) -> float:
        """Time without other traffic."""
        return self.latency_s + max(self.gpu_s, self.node_s)


def library_timing(
    transport: ExpertTransport,
    rows: SentTokens,
    shape: GroupShape,
    *,
    links: Bandwidths,
    profile: NetworkProfile | None,
    is_called: bool = True,
) -> LibraryTiming:
    """Return the timing of an exchange of `rows` over `shape`.

    Without a profile, links run at their nominal speed, and nothing else limits the exchange.
    If it `is_called` from a framework, that takes time as well. Rows that ride with another
    exchange have no latency, and no time for each row.
    """
    crossed = crossed_rows(transport, rows.tokens, shape)
    near_s = crossed.near * rows.row_bytes / links.gpu
    node_s = crossed.far * rows.row_bytes * float(shape.ranks_per_node) / links.node
    if profile is None:
        return LibraryTiming(latency_s=0.0, gpu_s=near_s, node_s=node_s)
    by = LIBRARIES[transport.library]
    share, rate = by.sent_link, by.sent_bytes_per_s
    if transport.returns:
        share, rate = by.returned_link, by.returned_bytes_per_s
    wider = max(0.0, log2(float(shape.ranks_per_node) / FITTED_RANKS))
    link_s = near_s / share * (1 + SPREAD.of(profile) * wider)
    row_s = (0.0 if transport.rides else by.row_s) + rows.row_bytes / rate
    worked_s = (crossed.received + by.relay * crossed.far) * row_s / transport.num_sms
    crowd = crowding(profile, log2(max(1.0, shape.nodes / 2)))
    latency_s = 0.0
    if not transport.rides:
        latency_s = by.start_s + is_called * by.call_s
        latency_s += _plan_s(transport, by, rows.tokens, shape, links=links, profile=profile)
    return LibraryTiming(
        latency_s=latency_s,
        gpu_s=both(link_s, worked_s),
        node_s=node_s / NIC.of(profile) * crowd,
    )


def _plan_s(
    transport: ExpertTransport,
    by: LibraryConstants,
    tokens: float,
    shape: GroupShape,
    *,
    links: Bandwidths,
    profile: NetworkProfile,
) -> float:
    """Return the seconds in which ranks agree on the rows of each, if this exchange is the first.

    Other exchanges of the same routing use the same plan.
    """
    if not transport.plans:
        return 0.0
    seconds = by.plan_s
    if by.gathers_map and shape.ranks > 1:
        size_bytes = round(tokens * transport.choice.experts * shape.ranks)
        taken = choose(profile, Collective.ALL_GATHER, size_bytes, shape, links=links)
        taken_ps = taken.time_ps(size_bytes, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node)
        seconds += taken_ps / PICOSECONDS_PER_SECOND
    return seconds
