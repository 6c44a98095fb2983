"""A fabric as described by its TOML file, for the nodes that it joins.

    title = "Two-level fat tree of 64-port switches"
    kind = "fat_tree"
    source = "..."

All other keys depend on the kind. A package registers a kind as an entry point of the group
"zsim.fabrics": its name, and a `FabricReader`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from zsim.cluster.cluster import Cluster, ClusterError, Fabric
from zsim.cluster.files import explicit_fabric, tiered_fabric
from zsim.cluster.files.fabric_reader import FabricReader
from zsim.cluster.files.table import TopologyError
from zsim.config_error import shown
from zsim.entry_point import registered
from zsim.suggestion import one_of

GROUP = "zsim.fabrics"
SHIPPED = (*tiered_fabric.READERS, explicit_fabric.READER)


@cache
def readers() -> Mapping[str, FabricReader]:
    """Return the readers of all installed kinds of fabric, by name."""
    return registered(GROUP, FabricReader, {each.kind.name: each for each in SHIPPED})


def fabric_of(name: str, table: object, node: Cluster) -> Fabric:
    """Return the fabric that `table`, read from TOML, describes, for nodes like `node`.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
    """
    if not isinstance(table, dict):
        raise TopologyError(f"{name}: {shown(table)} must be a table")
    described = cast("dict[str, Any]", table)
    kind = described.get("kind")
    if kind is None:
        raise TopologyError(f"{name}: kind: missing")
    if not isinstance(kind, str) or kind not in readers():
        raise TopologyError(f"{name}: kind: {one_of(str(kind), readers())}")
    try:
        return readers()[kind].read(name, described, node)
    except ClusterError as error:
        raise TopologyError(f"{name}: {error}") from None
