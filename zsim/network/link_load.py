"""The load of a collective on the links of a cluster, relative to that of a plain ring.

A backend computes the load of a ring on every link, per byte that neighbours exchange. Another
algorithm, or a network with fitted constants, scales the load on GPU links and the load on links
between nodes, and has another latency.
"""

from dataclasses import dataclass
from fractions import Fraction

from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.network import NetworkProfile
from zsim.model.expert_transport import ExpertTransport
from zsim.network.algorithm.activity import Activity, Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths, Request
from zsim.network.algorithm.constant import TENSOR_WAIT_S
from zsim.network.algorithm.installed_algorithms import algorithms, check
from zsim.network.algorithm.nvls import NVLS, Nvls
from zsim.network.tuner import choose, first_able
from zsim.schedule.operation import AllToAll, CollectiveOperation
from zsim.suggestion import one_of
from zsim.units import PICOSECONDS_PER_SECOND

TENSOR = "tensor"
"""The group of the tensor axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The forced algorithm by name, or None for the tuner's choice; and the number of chunks."""

    algorithm: str | None = None
    chunks: int = 4

    def __post_init__(self) -> None:
        if self.algorithm is not None and self.algorithm not in algorithms():
            raise ValueError(f"algorithm: {one_of(self.algorithm, algorithms())}")
        if self.chunks < 1:
            raise ValueError(f"chunks: {self.chunks} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLatency:
    """Latency from GPU to GPU, within a domain and between two domains, in picoseconds."""

    near_ps: int
    far_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Latency before bytes flow, and bytes per byte that neighbours in a ring exchange.

    `near` is for the link of each GPU, `far` for the links between nodes; bandwidth that an
    algorithm cannot use counts as load.
    """

    latency_ps: int
    near: Fraction
    far: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoads:
    """Link loads of collectives on a cluster with its constants, under a decision.

    Raises:
        ProfileError: a constant of the cluster's network is missing, unknown or out of range.
    """

    cluster: Cluster
    decision: Decision
    latency: PathLatency

    def __post_init__(self) -> None:
        if self.cluster.network is not None:
            check(self.cluster.network)

    def of(
        self,
        operation: CollectiveOperation,
        ring_bytes: int,
        shape: GroupShape,
        *,
        between_bytes: int | None = None,
    ) -> LinkLoad | None:
        """Return the load of `operation` over `shape`, whose ring would move `ring_bytes`.

        None if it is a plain ring: nothing is forced and no constants are fitted, or the forced
        algorithm cannot execute it, as a tree cannot gather. With unequal blocks, `ring_bytes` are
        of the busiest rank, and the busiest node exchanges `between_bytes` with the others.
        """
        if not ring_bytes:
            return None
        size_bytes = operation.whole.size * operation.wire.size_bytes
        if isinstance(operation, AllToAll) and operation.sent:  # as if all ranks were the busiest
            size_bytes = ring_bytes * shape.ranks // (shape.ranks - 1)
        measured = self._measured(operation.name, size_bytes, ring_bytes, shape)
        if measured is not None:
            return measured
        if isinstance(operation, AllToAll) and operation.by is not None:
            return self._by_library(
                operation.by,
                size_bytes,
                shape,
                row_bytes=operation.by.width * operation.wire.size_bytes,
                ring_bytes=ring_bytes,
                between_bytes=between_bytes,
            )
        # Copies of parts go directly from each rank to each other one.
        kind = Collective.ALL_TO_ALL if operation.in_parts else Collective(operation.name)
        activity = self.activity(kind, size_bytes, shape)
        if activity is None:
            return None
        per_ring_byte = Fraction(size_bytes, ring_bytes)
        node_bytes = activity.node_bytes * per_ring_byte
        if between_bytes is not None:
            node_bytes = Fraction(between_bytes, ring_bytes)
        return LinkLoad(
            latency_ps=activity.latency_ps + self._wait_ps(operation, shape),
            near=activity.gpu_bytes / activity.gpu_efficiency * per_ring_byte,
            far=node_bytes / activity.nic_efficiency,
        )

    def _measured(
        self, collective: str, size_bytes: int, ring_bytes: int, shape: GroupShape
    ) -> LinkLoad | None:
        """Return a load that reproduces the measured time; None if nothing was measured."""
        times = self.cluster.gpu.measured
        if times is None or shape.ranks == 1 or shape.nodes > 1:
            return None
        seconds = times.collective_s(collective, shape.ranks, size_bytes)
        if seconds is None:
            return None
        if times.runs_on_host:  # the host does its part when it learns of the end
            seconds -= times.landing_s(collective, shape.ranks, size_bytes)
        taken = max(1, round(seconds * self.cluster.switch_link.bytes_per_s))
        return LinkLoad(latency_ps=0, near=Fraction(taken, ring_bytes), far=Fraction(0))

    def _by_library(
        self,
        transport: ExpertTransport,
        size_bytes: int,
        shape: GroupShape,
        *,
        row_bytes: int,
        ring_bytes: int,
        between_bytes: int | None,
    ) -> LinkLoad:
        """Return the load of an exchange of rows by a library, `size_bytes` with all copies.

        With unequal blocks, copies for the busiest node are as much more as its rows.
        """
        from zsim.network.expert_library import SentTokens, library_timing  # noqa: PLC0415 (few models need it)

        rows = SentTokens(size_bytes / transport.choice.top_k / row_bytes, row_bytes)
        links, network = bandwidths(self.cluster, shape), self.cluster.network
        timing = library_timing(transport, rows, shape, links=links, profile=network)
        latency_ps = round(timing.latency_s * PICOSECONDS_PER_SECOND)
        if network is None:
            latency_ps = self.latency.near_ps if shape.nodes == 1 else self.latency.far_ps
        node_s = timing.node_s
        if between_bytes is not None and shape.nodes > 1:
            outside = float(shape.ranks_per_node) * (shape.nodes - 1) / shape.nodes
            node_s *= between_bytes / (size_bytes * outside)
        near, far = (
            Fraction(seconds * rate / ring_bytes).limit_denominator(10**6)
            for seconds, rate in ((timing.gpu_s, links.gpu), (node_s, links.node))
        )
        return LinkLoad(latency_ps=latency_ps, near=near, far=far)

    def _network(self) -> NetworkProfile | None:
        """Return the constants; if the switch cannot reduce, without NVLS."""
        network = self.cluster.network
        if network is None or self._switch_reduces or NVLS.name not in network.numbers:
            return network
        return network.changed(**{NVLS.name: 0.0})

    @property
    def _switch_reduces(self) -> bool:
        return self.cluster.has_switch and not self.cluster.over_pcie

    def _wait_ps(self, operation: CollectiveOperation, shape: GroupShape) -> int:
        network = self.cluster.network
        if network is None or operation.group != TENSOR or shape.nodes == 1:
            return 0
        wait_ps = round(TENSOR_WAIT_S.of(network) * PICOSECONDS_PER_SECOND)
        return operation.laps * shape.ranks * wait_ps

    def activity(
        self, collective: Collective, size_bytes: int, shape: GroupShape
    ) -> Activity | None:
        """Return the chosen or forced activity of a collective; None if it is a plain ring."""
        network = self._network()
        request = Request(
            collective=collective,
            size_bytes=size_bytes,
            shape=shape,
            links=bandwidths(self.cluster, shape),
            near_ps=self.latency.near_ps,
            far_ps=self.latency.far_ps,
            chunks=self.decision.chunks,
        )
        forced = self.decision.algorithm
        if forced is not None and (forced != Nvls.name or self._switch_reduces):
            found = algorithms()[forced].activity(request, network)
            if found is not None:
                return found
        if network is None:
            return algorithms()[first_able(collective, shape)].activity(request, network)
        return choose(network, collective, size_bytes, shape, links=request.links)


def bandwidths(cluster: Cluster, shape: GroupShape) -> Bandwidths:
    """Return the bandwidths of GPU links and NICs that a group of `shape` uses per domain."""
    gpus = cluster.gpus_per_node * cluster.nodes_per_domain
    nics = cluster.nics_per_node * cluster.nodes_per_domain * cluster.nic_link.bytes_per_s
    used = min(Fraction(1), shape.ranks_per_node / gpus)
    share = cluster.link_share(shape.ranks_per_node)
    return Bandwidths(
        gpu=max(1, int(cluster.switch_link.bytes_per_s * share)),
        node=max(1, int(nics * used)),
        pair=max(cluster.nics_per_node // cluster.gpus_per_node, 1) * cluster.nic_link.bytes_per_s,
    )
