"""Place a scenario or a schedule on another cluster: a measured node, or a scenario's cluster."""

from dataclasses import replace
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

from zsim.api.scenario import LoadedScenario, as_setting, load
from zsim.backend.backend import BackendError, load_backend
from zsim.cluster.cluster import ClusterError
from zsim.cluster.files import TopologyError
from zsim.files.installed import topology
from zsim.mistake import MistakeError, mistakes

if TYPE_CHECKING:
    from zsim.backend.document import Document
    from zsim.cluster.cluster import Cluster

FABRIC: Final = "single_switch"
"""Default fabric of a cluster given only by its node."""

TAKEN_AWAY: Final = (
    "cluster.topology=none",
    "cluster.nodes=none",
    "cluster.nics_per_node=none",
    "cluster.nvlink=none",
    "cluster.host_memory=none",
    "cluster.drives=none",
    "cluster.oversubscription=none",
    "compute=none",
    "network=none",
)
"""Settings that remove the cluster of a scenario."""


def placed(
    loaded: LoadedScenario,
    *,
    node: str | PathLike[str] | None = None,
    cluster: str | PathLike[str] | None = None,
    backend: str = "sim",
) -> LoadedScenario:
    """Return `loaded` on the node in a file, or a schedule on the cluster of a scenario, if given.

    A scenario gets as many ranks as the node has, unless it was loaded with a number of ranks.

    Raises:
        MistakeError: the node or scenario does not exist, or has too few ranks.
    """
    if node is None and cluster is None:
        return loaded
    if node is not None and cluster is not None:
        raise MistakeError("--cluster: cannot be combined with --node; remove one")
    with mistakes(BackendError):
        is_real = load_backend(backend).traits.is_real
    if is_real:
        option = "--cluster" if node is None else "--node"
        raise MistakeError(
            f"{option}: backend {backend} runs on this machine as it is; "
            "zsim compare --real shows both"
        )
    if cluster is not None:
        return on_cluster_of(loaded, cluster)
    assert node is not None
    found = node_of(node)
    if loaded.schedule_json is not None:
        return on_cluster(loaded, found, f"--node: {fspath(node)}")
    ranks = found.gpus_per_node if loaded.changes.ranks is None else loaded.changes.ranks
    if ranks > found.gpus_per_node:
        raise MistakeError(
            f"--node: {fspath(node)} has {found.gpus_per_node} ranks, {ranks} are asked for"
        )
    there = (as_setting("cluster.node", fspath(node)), f"cluster.fabric={FABRIC}")
    return load(loaded, (*TAKEN_AWAY, *there), ranks=ranks)


def node_of(node: str | PathLike[str]) -> "Cluster":
    """Return a cluster of one node: from a file, such as that of `measure`, or a preset.

    Raises:
        MistakeError: there is no such node.
    """
    with mistakes(TopologyError, ClusterError, prefix="--node: "):
        return topology(fspath(node), FABRIC, 1)


def on_cluster_of(loaded: LoadedScenario, scenario: str | PathLike[str]) -> LoadedScenario:
    """Return a schedule on the cluster of `scenario`, with as many nodes as its ranks need.

    Faults, neighbours and `network.algorithm` come from `scenario`.

    Raises:
        MistakeError: `loaded` is not a schedule, or the scenario does not exist.
    """
    if loaded.schedule_json is None:
        raise MistakeError(
            f"--cluster: {loaded.name} is a scenario, which has a cluster; change it with --set"
        )
    source = load(scenario).source
    found = source.job().cluster
    ranks = loaded.schedule.mesh.size
    cluster = replace(found, nodes=-(-ranks // found.gpus_per_node))
    return on_cluster(loaded, cluster, f"--cluster: {fspath(scenario)}", source.document)


def on_cluster(
    loaded: LoadedScenario,
    cluster: "Cluster",
    what: str,
    circumstances: "Document | None" = None,
) -> LoadedScenario:
    """Return a schedule with another cluster, which messages call `what`.

    Faults, neighbours and `network.algorithm` come from `circumstances`. Without it, faults and
    neighbours are kept, and the algorithm, which belongs to a network, is dropped.

    Raises:
        MistakeError: the cluster has fewer ranks than the schedule.
    """
    from zsim.backend.document import encode

    ranks = loaded.schedule.mesh.size
    if ranks > cluster.ranks:
        raise MistakeError(f"{what} has {cluster.ranks} ranks, the schedule is for {ranks}")
    there = circumstances or replace(loaded.document, decision=None)
    document = replace(
        loaded.document,
        cluster=cluster,
        faults=there.faults,
        neighbours=there.neighbours,
        decision=there.decision,
    )
    return replace(loaded, schedule_json=encode(document))
