"""The part of a fabric file that all kinds share, and the reader that each kind has."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zsim.cluster.cluster import Cluster, Fabric
from zsim.cluster.fabric_kind import FabricKind
from zsim.cluster.files.table import FileTable


class FabricTable(FileTable):
    """A whole file, to which a kind of fabric adds tables of its own."""

    title: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricReader:
    """A kind of fabric with the way in which its files are read.

    Attributes:
        read: returns the fabric that a table read from TOML describes, for nodes like the one
            given; its first argument is the name of the file, for messages. Raises TopologyError
            or ClusterError.
    """

    kind: FabricKind
    read: Callable[[str, dict[str, Any], Cluster], Fabric]
