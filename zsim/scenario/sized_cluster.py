"""The cluster of a scenario: its hardware, with the number of nodes that the axes need."""

from dataclasses import replace
from fractions import Fraction
from typing import Protocol, TypeVar

from zsim.cluster.cluster import Cluster, ClusterError, Overheads
from zsim.cluster.files import TopologyError, UnknownTopologyError
from zsim.cluster.files.node import PCIE_LATENCY_PS
from zsim.config_error import shown
from zsim.scenario.missing_keys import need_cluster_keys
from zsim.scenario.tables import ClusterTable, ParallelTable, Scenario, ScenarioError
from zsim.units import format_bytes


class Topology(Protocol):
    """Returns the cluster of a topology by name, or of a node on a fabric."""

    def __call__(
        self,
        name: str,
        fabric: str | None,
        nodes: int,
        gpu: str | None,
        /,
        *,
        nodes_per_domain: int | None,
    ) -> Cluster:
        """Return `nodes` nodes, with `gpu` in place of theirs if given.

        `nodes_per_domain` is the number of nodes that the job uses of each NVSwitch domain.
        """
        ...


def placed(scenario: Scenario, topology: Topology) -> tuple[Cluster, int]:
    """Return the cluster, and the number of ranks, or of groups that share sequences, per batch.

    Each of them reads different data, so they divide the global batch.

    Raises:
        ScenarioError: the axes do not fit the cluster, or there is none.
    """
    need_cluster_keys(scenario)
    cluster = cluster_of(scenario.cluster, scenario.parallel, topology)
    _, data = degrees(scenario.parallel, cluster)
    return cluster, readers(scenario.parallel, data)


def readers(parallel: ParallelTable, data: int) -> int:
    """Return the number of ranks, or of groups that share sequences, that read different data.

    Raises:
        ScenarioError: the size of a group does not divide the `data` ranks.
    """
    context = parallel.context
    if data % context:
        raise ScenarioError(f"parallel.context: {context} must divide the {data} ranks of data")
    return data // context * parallel.replicate


def on_ranks(scenario: Scenario, ranks: int) -> Scenario:
    """Return `scenario` on `ranks` ranks, with enough nodes for them; the other axes stay.

    Raises:
        ScenarioError: the tensor, replicate and pipeline axes do not divide `ranks`.
    """
    parallel = scenario.parallel
    others = parallel.tensor * parallel.replicate * parallel.pipeline
    if ranks < 1:
        raise ScenarioError(f"ranks: {ranks} must be at least 1")
    if ranks % others:
        last = "pipeline" if parallel.pipeline > 1 else "replicate"
        axis = "tensor" if ranks % parallel.tensor else last
        raise ScenarioError(
            f"parallel.{axis}: {getattr(parallel, axis)} must divide the {ranks} ranks"
        )
    return scenario.model_copy(
        update={
            "cluster": scenario.cluster.model_copy(update={"nodes": None}),
            "parallel": scenario.parallel.model_copy(update={"data": ranks // others}),
        }
    )


def cluster_of(table: ClusterTable, parallel: ParallelTable, topology: Topology) -> Cluster:
    """Return the cluster that `[cluster]` describes, with the number of nodes that is needed."""
    cluster = _nodes_of(table, topology, table.nodes or 1)
    if table.nodes is None:
        assert parallel.data is not None  # one of the two is given
        ranks = parallel.replicate * parallel.data * parallel.tensor * parallel.pipeline
        cluster = _nodes_of(table, topology, -(-ranks // cluster.gpus_per_node))
    return with_overrides(table, cluster)


def with_overrides(table: ClusterTable, cluster: Cluster) -> Cluster:
    """Return `cluster` with the values of `table` in place of those of its topology.

    Raises:
        ScenarioError: the fabric has no leaves to oversubscribe, or the node does not describe the
            host memory, PCIe slots or drives to change.
    """
    if table.gpu_memory is not None:
        gpu = replace(
            cluster.gpu,
            memory_bytes=table.gpu_memory,
            visible_bytes=None,
            overheads=Overheads(),
        )
        cluster = replace(cluster, gpu=gpu)
    if table.nics_per_node is not None:
        cluster = replace(cluster, nics_per_node=table.nics_per_node)
    if not table.nvlink:
        slot = _known(cluster.pcie_link, "nvlink: false", "PCIe slots", cluster)
        # a hop over PCIe to another GPU; a copy to the host starts with the latency of the slot
        slot = replace(slot, latency_ps=max(slot.latency_ps, PCIE_LATENCY_PS))
        cluster = replace(
            cluster,
            switch_link=slot,
            nodes_per_domain=1,
            board_link=None,
            has_switch=True,
            over_pcie=True,
        )
    if (memory := table.host_memory) is not None:
        given = f"host_memory: {format_bytes(memory)}"
        host = _known(cluster.host, given, "host memory", cluster)
        pinned = None if host.pinned_bytes is None else min(host.pinned_bytes, memory)
        cluster = replace(cluster, host=replace(host, memory_bytes=memory, pinned_bytes=pinned))
    if (count := table.drives) is not None:
        drives = _known(cluster.drives, f"drives: {count}", "drives", cluster)
        cluster = replace(cluster, drives=replace(drives, count=count))
    if table.oversubscription is not None:
        cluster = _oversubscribed(cluster, table.oversubscription)
    return cluster


Described = TypeVar("Described")


def _known(found: Described | None, given: str, what: str, cluster: Cluster) -> Described:
    """Return `found`, a part of the node's description.

    Raises:
        ScenarioError: it is None: the node does not describe it.
    """
    if found is None:
        why = f"{cluster.name} does not describe its {what}; use another node or your own file"
        raise ScenarioError(f"cluster.{given}: {why}")
    return found


def _nodes_of(table: ClusterTable, topology: Topology, nodes: int) -> Cluster:
    """Return `nodes` nodes of the topology, or of the node on its fabric."""
    node, fabric = table.node, table.fabric
    if table.topology is not None:
        if node is not None or fabric is not None:
            key, value = ("node", node) if node is not None else ("fabric", fabric)
            raise ScenarioError(
                f"cluster.{key}: {shown(value)} cannot be combined with cluster.topology; "
                "remove one"
            )
        name, where = table.topology, "cluster.topology"
    elif node is not None and fabric is not None:
        name, where = node, "cluster"
    else:
        missing, other = ("node", "fabric") if node is None else ("fabric", "node")
        raise ScenarioError(
            f"cluster.{missing}: missing, cluster.{other} needs one (zsim list {missing}s)"
        )
    try:
        return topology(name, fabric, nodes, table.gpu, nodes_per_domain=table.nodes_per_domain)
    except UnknownTopologyError as error:
        raise ScenarioError(f"cluster.{error.part}: {error}") from None
    except (TopologyError, ClusterError) as error:
        raise ScenarioError(f"{where}: {error}") from None


def _oversubscribed(cluster: Cluster, oversubscription: Fraction) -> Cluster:
    """Return `cluster` with this oversubscription at its leaves."""
    fabric = cluster.fabric
    if not fabric.tiers:
        raise ScenarioError(
            f"cluster.oversubscription: {oversubscription} is for a fabric with leaves, "
            f"{fabric.kind} has none"
        )
    leaf = replace(fabric.tiers[0], oversubscription=oversubscription)
    return replace(cluster, fabric=replace(fabric, tiers=(leaf, *fabric.tiers[1:])))


def degrees(parallel: ParallelTable, cluster: Cluster) -> tuple[int, int]:
    """Return the ranks of the tensor and the data axis; raise unless they fit the cluster."""
    tensor, data, replicate = parallel.tensor, parallel.data, parallel.replicate
    others = tensor * replicate * parallel.pipeline
    for name, degree in (
        ("tensor", tensor),
        ("replicate", tensor * replicate),
        ("pipeline", others),
    ):
        if data is None and cluster.ranks % degree:
            of = f" {tensor} tensor ranks x {degree // tensor}" if degree > tensor else f" {tensor}"
            raise ScenarioError(
                f"parallel.{name}:{of} must divide the {cluster.ranks} ranks of the cluster"
            )
    most = cluster.ranks // others
    if data is None:
        return tensor, most
    if data > most:
        times = others // tensor
        taken = f"tensor takes {tensor} each" + (f", {times} times" if times > 1 else "")
        raise ScenarioError(
            f"parallel.data: {data} must be at most {most}: "
            f"the cluster has {cluster.ranks} ranks, {taken}"
        )
    return tensor, data
