"""A kind of fabric: a torus of two dimensions.

Every node is joined to four others, and passes on what is for those behind them.
"""

from itertools import product
from typing import Any

from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Link
from zsim.cluster.fabric_kind import FabricKind
from zsim.cluster.files.fabric_reader import FabricReader, FabricTable
from zsim.cluster.files.table import Bandwidth, Count, Time, read

TORUS = FabricKind(name="torus", has_edges=True, above_nics="torus", summary="torus, {edges} links")


class TorusFile(FabricTable):
    """A whole file: `columns` times `rows` nodes, and one link of those between neighbours."""

    columns: Count
    rows: Count
    bandwidth_per_direction: Bandwidth
    latency: Time


def torus(name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """Return the links between neighbours, nodes numbered row by row."""
    del node
    file = read(TorusFile, name, table)
    link = Link(bytes_per_s=file.bandwidth_per_direction, latency_ps=file.latency)
    ends: set[tuple[int, int]] = set()
    for row, column in product(range(file.rows), range(file.columns)):
        here = row * file.columns + column
        right = row * file.columns + (column + 1) % file.columns
        below = (row + 1) % file.rows * file.columns + column
        ends |= {(min(here, there), max(here, there)) for there in (right, below) if there != here}
    edges = (
        FabricEdge(source=f"node{one}", target=f"node{other}", link=link)
        for one, other in sorted(ends)
    )
    return Fabric(kind=TORUS, edges=tuple(edges))


READER = FabricReader(kind=TORUS, read=torus)
