"""The shared part of fabric files, and the reader of a kind of fabric."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zsim.cluster.cluster import Cluster, Fabric
from zsim.cluster.fabric_kind import FabricKind
from zsim.cluster.files.table import FileTable


class FabricTable(FileTable):
    """A whole file; each kind of fabric adds its own tables."""

    title: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricReader:
    """A kind of fabric with the function that reads its files.

    Attributes:
        read: returns the fabric that a table read from TOML describes, for nodes like the given
            one; its first argument is the name of the file, for messages. Raises TopologyError or
            ClusterError.
    """

    kind: FabricKind
    read: Callable[[str, dict[str, Any], Cluster], Fabric]
