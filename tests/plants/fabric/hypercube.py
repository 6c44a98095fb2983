"""A kind of fabric: a hypercube.

Every node is joined to those whose number differs in one bit, and passes on what is for others.
"""

from typing import Annotated, Any

from pydantic import Field

from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Link
from zsim.cluster.fabric_kind import FabricKind
from zsim.cluster.files.fabric_reader import FabricReader, FabricTable
from zsim.cluster.files.table import Bandwidth, Count, Time, read

HYPERCUBE = FabricKind(
    name="hypercube", has_edges=True, above_nics="hypercube", summary="hypercube, {edges} links"
)


class HypercubeFile(FabricTable):
    """A whole file: 2 to the power of `bits` nodes, and one link of those between neighbours."""

    bits: Annotated[Count, Field(le=12)]
    bandwidth_per_direction: Bandwidth
    latency: Time


def hypercube(name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """Return the links between neighbours."""
    del node
    file = read(HypercubeFile, name, table)
    link = Link(bytes_per_s=file.bandwidth_per_direction, latency_ps=file.latency)
    edges = (
        FabricEdge(source=f"node{one}", target=f"node{one | 1 << bit}", link=link)
        for one in range(1 << file.bits)
        for bit in range(file.bits)
        if not one >> bit & 1
    )
    return Fabric(kind=HYPERCUBE, edges=tuple(edges))


READER = FabricReader(kind=HYPERCUBE, read=hypercube)
