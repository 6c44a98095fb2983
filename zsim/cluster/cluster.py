"""A cluster: GPUs, the links between them, and their numbers. It is a value, not a graph."""

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise

from zsim.cluster.cluster_error import ClusterError
from zsim.cluster.fabric_kind import SINGLE_SWITCH, FabricKind
from zsim.cluster.host_side import CopyRates, Drives, Host
from zsim.cluster.profile.host_launch import FREE, LaunchCosts
from zsim.cluster.profile.kernels import KernelProfile
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.cluster.profile.network import NetworkProfile
from zsim.dtype import Multiplied

__all__ = [
    "Cluster",
    "ClusterError",
    "Fabric",
    "FabricEdge",
    "Gpu",
    "Link",
    "Overheads",
    "Rate",
    "Tier",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Operations per second of kernels in one format.

    `peak` is the vendor's number, used for utilization. `matmul` and `elementwise` are predicted
    rates of kernels. Libraries may use matrix units only for products whose extents are all
    multiples of `multiple`.
    """

    dtype: Multiplied
    peak: int
    matmul: int
    elementwise: int
    multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("peak", "matmul", "elementwise", "multiple"):
            if getattr(self, name) < 1:
                raise ClusterError(f"rate of {self.dtype}: {name} must be more than 0")

    def peak_of(self, shape: tuple[int, ...]) -> int:
        """Return the peak of products of `shape` (batch, m, n, k); lower if unaligned."""
        off = any(extent % self.multiple for extent in shape[1:])
        return self.elementwise if off and len(shape) == 4 else self.peak


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """GPU memory of a training process in addition to its tensors, in bytes.

    Attributes:
        context_bytes: the CUDA context with the loaded kernels.
        workspace_bytes: the workspace of cuBLAS.
        communicator_bytes: NCCL buffers of each communicator of a rank.
    """

    context_bytes: int = 0
    workspace_bytes: int = 0
    communicator_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("context_bytes", "workspace_bytes", "communicator_bytes"):
            if getattr(self, name) < 0:
                raise ClusterError(f"overheads: {name} {getattr(self, name)} must be at least 0")

    def total_bytes(self, communicators: int) -> int:
        """Return the overhead of a rank with this number of communicators."""
        return self.context_bytes + self.workspace_bytes + communicators * self.communicator_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator: memory, its bandwidth, and rates by format.

    `memory_bytes` is the vendor's number, `visible_bytes` that of the driver, if known;
    `overheads` are subtracted from it. `launch` is the host time to issue operations; fitted
    constants in `kernels` have their own launch costs.

    `collective_share` is the fraction of its multiprocessors that the kernel of one collective
    occupies, also while it waits for its peers; 0 if not measured. With `kernels` (fitted
    constants), kernel times follow from these constants and the peaks in `rates`. With
    `measured`, all times come from measurements on such ranks. With `fp8_any_layout`, products of
    8-bit floats with one scale need no transposed copies. `nearest` is the kind of a measured GPU
    with the same architecture.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: int
    rates: tuple[Rate, ...]
    launch: LaunchCosts = FREE
    collective_share: Fraction = Fraction(0)
    kernels: KernelProfile | None = None
    visible_bytes: int | None = None
    overheads: Overheads = Overheads()
    measured: MeasuredTimes | None = None
    fp8_any_layout: bool = False
    nearest: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s", "visible_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ClusterError(f"gpu {self.name}: {name} must be more than 0")
        if not 0 <= self.collective_share < 1:
            raise ClusterError(
                f"gpu {self.name}: collective_share {self.collective_share} must be at least 0 "
                "and less than 1"
            )

    def usable_bytes(self, communicators: int) -> int:
        """Return the bytes for the tensors of a rank with this number of communicators."""
        visible = self.memory_bytes if self.visible_bytes is None else self.visible_bytes
        return max(0, visible - self.overheads.total_bytes(communicators))

    @property
    def launch_costs(self) -> LaunchCosts:
        """Host time to issue operations: from the fitted constants, if there are any."""
        return self.launch if self.kernels is None else self.kernels.launch

    def timed_by(self, kernels: KernelProfile) -> "Gpu":
        """Return this GPU with the fitted constants `kernels`."""
        return replace(self, kernels=kernels)

    def rate(self, dtype: Multiplied) -> Rate:
        """Return the rates of `dtype`.

        Raises:
            ClusterError: the GPU has no rates for it.
        """
        for rate in self.rates:
            if rate.dtype is dtype:
                return rate
        known = ", ".join(rate.dtype for rate in self.rates)
        raise ClusterError(f"gpu {self.name}: no rate for {dtype}, it has {known or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link: bytes per second of each direction, and latency of one hop."""

    bytes_per_s: int
    latency_ps: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s < 1 or self.latency_ps < 0:
            raise ClusterError("link: bandwidth must be more than 0 and latency at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Switches with other switches above, modelled as one switch for each group of nodes.

    Attributes:
        name: "leaf" or "spine".
        nodes_below: nodes below one group; on rails, the nodes that share the leaves of all rails.
        oversubscription: capacity from below over capacity to above; 1 is full bandwidth, 2 half.
        latency_ps: total latency added by going up from here and down again.
    """

    name: str
    nodes_below: int
    oversubscription: Fraction = Fraction(1)
    latency_ps: int = 0

    def __post_init__(self) -> None:
        if self.nodes_below < 1:
            raise ClusterError(f"{self.name}: nodes_below {self.nodes_below} must be at least 1")
        if self.oversubscription <= 0:
            raise ClusterError(
                f"{self.name}: oversubscription {self.oversubscription} must be more than 0"
            )
        if self.latency_ps < 0:
            raise ClusterError(f"{self.name}: latency_ps {self.latency_ps} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricEdge:
    """One bidirectional link of an explicit fabric, by the names of its ends.

    `node3` is node 3 with all its NICs; every other name is a switch. Routes take the fewest hops,
    for which this link counts `hops`.
    """

    source: str
    target: str
    link: Link
    hops: int = 1


class FabricRouting(StrEnum):
    """How a fabric that lists its links chooses among routes."""

    MINIMAL = "minimal"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """The fabric between NICs. The top (core, spine, or the single switch) limits nothing.

    Attributes:
        tiers: tiers below the top, from the nodes up; empty for a single switch.
        edges: all links of an explicit fabric.
        routing: routes through `edges`: the shortest, or also longer ones where these are full.
    """

    kind: FabricKind = SINGLE_SWITCH
    tiers: tuple[Tier, ...] = ()
    edges: tuple[FabricEdge, ...] = ()
    routing: FabricRouting = FabricRouting.MINIMAL

    def __post_init__(self) -> None:
        kind = self.kind
        if self.tiers and not kind.has_tiers:
            raise ClusterError(f"fabric {kind}: has no tiers, {len(self.tiers)} given")
        if kind.needs_tiers and not self.tiers:
            raise ClusterError(f"fabric {kind}: needs at least one tier")
        if bool(self.edges) != kind.has_edges:
            allowed = "at least 1" if kind.has_edges else "0"
            raise ClusterError(f"fabric {kind}: edges: {len(self.edges)} must be {allowed}")
        for below, above in pairwise(self.tiers):
            if above.nodes_below % below.nodes_below or above.nodes_below == below.nodes_below:
                raise ClusterError(
                    f"{above.name}: nodes_below {above.nodes_below} must be a multiple of "
                    f"{below.nodes_below}, those of {below.name}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes of equal GPUs. A switch joins the GPUs of a domain; a fabric joins nodes.

    Attributes:
        switch_link: link of a GPU to the switch of its domain (NVLink to NVSwitch).
        nic_link: link of a NIC to the fabric; a node has `nics_per_node` of them.
        cites: source of each number, by key.
        fabric: the fabric between the NICs.
        nodes_per_domain: nodes joined by one NVSwitch domain: 1, or more in an NVLink rack.
        pcie_link: link of a GPU to the PCIe switch that it shares with its NIC.
        gpus_per_pcie_switch: GPUs on one PCIe switch. Its uplink is assumed to be as fast as the
            link of one GPU.
        gpus_per_root_port: GPUs whose PCIe switches share one link of the same speed to the CPUs;
            None if each switch has its own.
        copies: measured rates of copies between host memory and GPUs.
        host: CPU memory of a node; None if unknown.
        drives: local drives of a node; None if unknown.
        board_link: link between the two baseboards of a node, each with half of the GPUs and NICs.
            Its latency is added to that within a board.
        network: fitted constants of collectives; without them, rings at the speed of links.
        has_switch: True if the GPUs of a node meet on a switch. Else each pair of GPUs has an equal
            share of their links, and `switch_link` is the sum of a GPU's links.
        over_pcie: True if the GPUs of a node are joined only by PCIe; `switch_link` is then a PCIe
            slot, without in-network reduction.
    """

    name: str
    nodes: int
    gpus_per_node: int
    gpu: Gpu
    switch_link: Link
    nics_per_node: int
    nic_link: Link
    cites: tuple[tuple[str, str], ...] = ()
    fabric: Fabric = Fabric()
    nodes_per_domain: int = 1
    pcie_link: Link | None = None
    gpus_per_pcie_switch: int = 1
    gpus_per_root_port: int | None = None
    copies: CopyRates | None = None
    host: Host | None = None
    drives: Drives | None = None
    board_link: Link | None = None
    network: NetworkProfile | None = None
    has_switch: bool = True
    over_pcie: bool = False

    def __post_init__(self) -> None:
        for name in (
            "nodes",
            "gpus_per_node",
            "nics_per_node",
            "nodes_per_domain",
            "gpus_per_pcie_switch",
        ):
            if getattr(self, name) < 1:
                raise ClusterError(f"{name}: {getattr(self, name)} must be at least 1")
        per_switch, per_port = self.gpus_per_pcie_switch, self.gpus_per_root_port
        if per_port is not None and (per_port < 1 or per_port % per_switch):
            raise ClusterError(
                f"gpus_per_root_port: {per_port} must be a multiple of gpus_per_pcie_switch, "
                f"{per_switch}"
            )
        self._refuse_fast_copies()
        if not self.has_switch and (self.pcie_link is None or self.nodes_per_domain > 1):
            raise ClusterError("nvswitch: false needs [pcie], by which bytes leave, and one node")
        if self.over_pcie and (not self.has_switch or self.nodes_per_domain > 1):
            raise ClusterError("pcie_only: true goes without nvswitch = false, and with one node")
        if self.board_link is not None and (self.gpus_per_node % 2 or self.nodes_per_domain > 1):
            raise ClusterError("board_link: two boards need an even number of GPUs and one node")
        for tier in self.fabric.tiers:
            fewer, more = sorted((tier.nodes_below, self.nodes_per_domain))
            if more % fewer:
                raise ClusterError(
                    f"{tier.name}: nodes_below {tier.nodes_below} must divide, or be a multiple "
                    f"of, the {self.nodes_per_domain} nodes of a domain"
                )
        if self.fabric.edges:
            self._refuse_lone_nodes()

    def _refuse_fast_copies(self) -> None:
        if self.copies is None:
            return
        if self.pcie_link is None:
            raise ClusterError("copies: need pcie, which this node does not describe")
        for name in ("to_gpu_bytes_per_s", "from_gpu_bytes_per_s"):
            speed, most = getattr(self.copies, name), self.pcie_link.bytes_per_s
            if speed > most:
                raise ClusterError(f"copies: {name} {speed} must be at most {most}, that of pcie")

    def _refuse_lone_nodes(self) -> None:
        ends = {end for edge in self.fabric.edges for end in (edge.source, edge.target)}
        for node in range(self.nodes):
            if f"node{node}" not in ends:
                raise ClusterError(f"fabric: no edge for node{node} of {self.nodes} nodes")

    @property
    def ranks(self) -> int:
        """GPUs in the cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def domains(self) -> int:
        """NVSwitch domains; the last one may have fewer nodes than the others."""
        return -(-self.nodes // self.nodes_per_domain)

    def link_share(self, ranks: int | Fraction) -> Fraction:
        """Return the fraction of a GPU's links that lead to its group with `ranks` ranks on a node.

        Without a switch, two GPUs have only the links between them.
        """
        others = self.gpus_per_node - 1
        if self.has_switch or ranks <= 1 or not others:
            return Fraction(1)
        return min(Fraction(1), (Fraction(ranks) - 1) / others)

    @property
    def pcie_switches(self) -> int:
        """PCIe switches of a node."""
        return -(-self.gpus_per_node // self.gpus_per_pcie_switch)

    @property
    def root_ports(self) -> int:
        """Links between the CPUs of a node and its PCIe switches."""
        return -(-self.gpus_per_node // (self.gpus_per_root_port or self.gpus_per_pcie_switch))

    @property
    def node_bytes_per_s(self) -> int:
        """Bytes per second that all NICs of a node send together."""
        return self.nics_per_node * self.nic_link.bytes_per_s

    def uplink_bytes_per_s(self, tier: int) -> Fraction:
        """Return the uplink bandwidth of a full group of tier `tier`, over all rails."""
        found = Fraction(self.fabric.tiers[tier].nodes_below * self.node_bytes_per_s)
        for each in self.fabric.tiers[: tier + 1]:
            found /= each.oversubscription
        return found


def unknown_cluster(name: str, ranks: int, *, memory_bytes: int) -> Cluster:
    """Return ranks with known memory alone; real ranks need no rates or links."""
    link = Link(bytes_per_s=1)
    return Cluster(
        name=name,
        nodes=1,
        gpus_per_node=ranks,
        gpu=Gpu(name="rank", memory_bytes=memory_bytes, memory_bytes_per_s=1, rates=()),
        switch_link=link,
        nics_per_node=1,
        nic_link=link,
    )
