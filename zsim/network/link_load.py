"""What a collective of a schedule asks of a cluster's links, beside what a plain ring would ask.

A backend knows how a ring loads every link for each byte that neighbours exchange. Another
algorithm, or a network whose constants are fitted, takes that many times more or less from a GPU's
link and from what is between nodes, after another latency.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import assert_never

from zsim.cluster.cluster import Cluster
from zsim.network.algorithm import hierarchical
from zsim.network.algorithm.activity import Activity, Algorithm, Collective, Protocol, Shape
from zsim.network.tuner import Bandwidths, choose, work
from zsim.schedule.operation import AllGather, AllReduce, Broadcast, ReduceScatter
from zsim.units import PICOSECONDS_PER_SECOND

TENSOR = "tensor"
"""The group of the tensor axis."""

Ringed = AllGather | AllReduce | Broadcast | ReduceScatter


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is asked for: an algorithm, or None for the tuner's choice, and how many chunks.

    `tensor_wait_ps` is what a collective of the tensor axis waits for each of its ranks, where they
    are on several nodes; an all-reduce does so twice.
    """

    algorithm: Algorithm | None = None
    chunks: int = 4
    tensor_wait_ps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Latency of a way from GPU to GPU, within a domain and between two, in picoseconds."""

    near_ps: int
    far_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Latency before bytes flow, and bytes per byte that neighbours in a ring exchange.

    `near` is for the link of each GPU, `far` for the links between nodes; what an algorithm cannot
    use of a link counts as taken.
    """

    latency_ps: int
    near: Fraction
    far: Fraction


def tensor_bytes(operation: Ringed) -> int:
    """Bytes of the whole tensor: S of zsim.network.algorithm.activity."""
    match operation:
        case AllGather(target=whole) | ReduceScatter(source=whole):
            return whole.size * operation.wire.size_bytes
        case AllReduce(source=whole) | Broadcast(source=whole):
            return whole.size * operation.wire.size_bytes
        case _:
            assert_never(operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What decides: the cluster with its constants, what is asked for, and latencies of ways."""

    cluster: Cluster
    decision: Decision
    ways: Ways

    def of(self, operation: Ringed, ring_bytes: int, shape: Shape) -> Demand | None:
        """What `operation` asks for over `shape`, whose ring would pass `ring_bytes`.

        None if it is a plain ring: nothing is forced and no constants are fitted, or what is
        forced cannot do it, as a tree cannot gather.
        """
        if not ring_bytes:
            return None
        size_bytes = tensor_bytes(operation)
        activity = self._activity(_collective(operation), size_bytes, shape)
        if activity is None:
            return None
        per_ring_byte = Fraction(size_bytes, ring_bytes)
        return Demand(
            latency_ps=activity.latency_ps + self._wait_ps(operation, shape),
            near=activity.gpu_bytes / activity.gpu_efficiency * per_ring_byte,
            far=activity.node_bytes / activity.nic_efficiency * per_ring_byte,
        )

    def _wait_ps(self, operation: Ringed, shape: Shape) -> int:
        if operation.group != TENSOR or shape.nodes == 1:
            return 0
        rounds = 2 if isinstance(operation, AllReduce) else 1
        return rounds * shape.ranks * self.decision.tensor_wait_ps

    def _activity(self, collective: Collective, size_bytes: int, shape: Shape) -> Activity | None:
        forced, network = self.decision.algorithm, self.cluster.network
        done = work(forced, collective, shape) if forced is not None else None
        if network is not None and done is not None and not network.can(forced or Algorithm.RING):
            done = None
        links = self._bandwidths(shape)
        if forced is Algorithm.HIERARCHICAL and done is not None:
            return self._hierarchical(collective, size_bytes, shape, links)
        if network is not None:
            asked = forced if done is not None else None
            return choose(network, collective, size_bytes, shape, links=links, forced=asked)
        if forced is None or forced is Algorithm.RING or done is None:
            return None
        hops_ps = done.near_hops * self.ways.near_ps + done.far_hops * self.ways.far_ps
        return Activity(
            algorithm=forced,
            protocol=Protocol.SIMPLE,
            latency_ps=hops_ps,
            gpu_bytes=done.gpu_bytes,
            node_bytes=done.node_bytes,
        )

    def _hierarchical(
        self, collective: Collective, size_bytes: int, shape: Shape, links: Bandwidths
    ) -> Activity | None:
        """In chunks, over links at the share that the constants say, or at their nominal speed."""
        network = self.cluster.network
        near = far = Fraction(1)
        near_ps, far_ps = self.ways.near_ps, self.ways.far_ps
        if network is not None:
            near, far = (
                Fraction(each).limit_denominator(10**6) for each in (network.link, network.nic)
            )
            near_ps = round(network.simple_hop_s * PICOSECONDS_PER_SECOND)
            far_ps = near_ps + round(network.far_hop_s * PICOSECONDS_PER_SECOND)
        speeds = hierarchical.Speeds(
            near_bytes_per_s=int(links.gpu * near),
            near_latency_ps=near_ps,
            far_bytes_per_s=int(links.node * far),
            far_latency_ps=far_ps,
        )
        found = hierarchical.activity(
            collective, size_bytes, shape, speeds=speeds, chunks=self.decision.chunks
        )
        return found and replace(found, gpu_efficiency=near, nic_efficiency=far)

    def _bandwidths(self, shape: Shape) -> Bandwidths:
        """Of a GPU's link, and of the NICs of a domain that its ranks of the group use."""
        cluster = self.cluster
        gpus = cluster.gpus_per_node * cluster.nodes_per_domain
        nics = cluster.nics_per_node * cluster.nodes_per_domain * cluster.nic_link.bytes_per_s
        used = min(Fraction(1), shape.ranks_per_node / gpus)
        return Bandwidths(gpu=cluster.switch_link.bytes_per_s, node=max(1, int(nics * used)))


def _collective(operation: Ringed) -> Collective:
    match operation:
        case AllGather():
            return Collective.ALL_GATHER
        case ReduceScatter():
            return Collective.REDUCE_SCATTER
        case AllReduce():
            return Collective.ALL_REDUCE
        case Broadcast():
            return Collective.BROADCAST
        case _:
            assert_never(operation)
