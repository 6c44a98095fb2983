"""A fabric as described by its TOML file, for the nodes that it joins.

    title = "Two-level fat tree of 64-port switches"
    kind = "fat_tree"
    source = "..."

All other keys depend on the kind. One line can replace the file:
`torus:sizes=4x4x4`, or `dragonfly:groups=9,routers=4,nodes=2,global=2`. A package registers a kind
as an entry point of the group "zsim.fabrics": its name, and a `FabricReader`.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from zsim.cluster.cluster import Cluster, ClusterError, Fabric
from zsim.cluster.files import explicit_fabric, generated_fabric, tiered_fabric
from zsim.cluster.files.fabric_reader import FabricReader
from zsim.cluster.files.table import TopologyError
from zsim.config_error import shown
from zsim.entry_point import registered
from zsim.suggestion import one_of

GROUP = "zsim.fabrics"
SHIPPED = (*tiered_fabric.READERS, explicit_fabric.READER, *generated_fabric.READERS)


@cache
def readers() -> Mapping[str, FabricReader]:
    """Return the readers of all installed kinds of fabric, by name."""
    return registered(GROUP, FabricReader, {each.kind.name: each for each in SHIPPED})


def table_of_line(text: str) -> dict[str, Any] | None:
    """Return the table of a fabric from a line such as `torus:sizes=4x4x4`; None for other texts.

    Raises:
        TopologyError: a part is not KEY=VALUE.
    """
    kind, colon, rest = text.partition(":")
    if not colon or kind not in readers() or "/" in kind:
        return None
    table: dict[str, Any] = {"title": text, "kind": kind, "source": "as given"}
    for part in rest.split(","):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not equals or not key or key in table:
            raise TopologyError(f"{text}: {part!r} must be KEY=VALUE, each key once")
        table[key] = (
            int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else value
        )
    return table


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
