"""A cluster from its parts: a GPU in a node, and nodes on a fabric; a system names both.

A system is a file of three lines:

    title = "DGX-2 on one InfiniBand switch"
    node = "dgx2"
    fabric = "single_switch"

A file that describes a node in full, and optionally a `[fabric]`, is a system, too.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.files.domain import in_domains
from zsim.cluster.files.fabric import fabric_of
from zsim.cluster.files.node import node_of
from zsim.cluster.files.table import Part, TopologyError, UnknownTopologyError, cites
from zsim.limits import limits

Find = Callable[[Part, str], dict[str, Any]]
"""Function that returns the table of a part by name; raises UnknownTopologyError if unknown."""


def nothing_ships(part: Part, name: str) -> dict[str, Any]:
    """Raise UnknownTopologyError: a `Find` for tables that name no other parts.

    Raises:
        UnknownTopologyError: always.
    """
    raise UnknownTopologyError(f"{part}: {name!r} is not known here", part)


def cluster_of(
    name: str,
    table: dict[str, Any],
    nodes: int,
    find: Find = nothing_ships,
    *,
    gpu: str | None = None,
    nodes_per_domain: int | None = None,
) -> Cluster:
    """Return `nodes` nodes of the system in `table`, read from TOML; `find` looks up its parts.

    `gpu` names a GPU that replaces that of the node. `nodes_per_domain` is the number of nodes that
    the job uses of each NVSwitch domain (default `domain_share`).

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
        ClusterError: `nodes` is less than 1, the fabric does not fit them, or a domain has fewer
            nodes than `nodes_per_domain`.
    """
    rest = dict(table)
    fabric = rest.pop("fabric", None)
    if isinstance(rest.get("node"), str):
        extra = sorted(rest.keys() - {"title", "node"})
        if extra:
            raise TopologyError(f"{name}: {extra[0]}: unknown key beside the name of a node")
        rest = dict(find(Part.NODE, rest["node"]))
    if gpu is not None:
        rest["gpu"] = gpu
    if isinstance(rest.get("gpu"), str):
        rest["gpu"] = find(Part.GPU, rest["gpu"])
    node = node_of(name, rest)
    most = limits().ranks // node.gpus_per_node
    if nodes > most:
        raise ClusterError(f"nodes: {nodes} must be at most {most:,}, with the GPUs that each has")
    node = in_domains(node, nodes, nodes_per_domain)
    if fabric is None:
        return replace(node, nodes=nodes)
    described = find(Part.FABRIC, fabric) if isinstance(fabric, str) else fabric
    return replace(
        node,
        nodes=nodes,
        fabric=fabric_of(fabric if isinstance(fabric, str) else f"{name}: fabric", described, node),
        cites=(*node.cites, *cites(described, "fabric")),
    )
