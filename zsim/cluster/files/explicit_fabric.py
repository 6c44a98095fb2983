"""Files of explicit fabrics, which list every link.

kind = "explicit"

[[edges]]
source = "node0"                # node 0 with all its NICs; every other name is a switch
target = "leaf0"
bandwidth_per_direction = "400 GB/s"
latency = "1 us"
"""

from typing import Annotated, Any

from pydantic import Field

from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Link
from zsim.cluster.fabric_kind import EXPLICIT
from zsim.cluster.files.fabric_reader import FabricReader, FabricTable
from zsim.cluster.files.table import Bandwidth, Count, Plain, Time, TopologyError, read

Name = Annotated[str, Field(pattern=r"^[\w.:/-]+$")]
"""Name of a switch or node: one word."""


class EdgeTable(Plain):
    """`[[edges]]`: a link in both directions."""

    source: Name
    target: Name
    bandwidth_per_direction: Bandwidth
    latency: Time
    hops: Count = 1


class _ExplicitFile(FabricTable):
    """The whole file."""

    edges: tuple[EdgeTable, ...] = ()


def _read(name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """Return the fabric; its edges must be connected and unique."""
    import networkx as nx

    del node
    tables = read(_ExplicitFile, name, table).edges
    graph: nx.Graph[str] = nx.Graph()
    for edge in tables:
        if edge.source == edge.target or graph.has_edge(edge.source, edge.target):
            raise TopologyError(
                f"{name}: {edge.source} to {edge.target}: must join two ends, once; links side "
                "by side are one with their bandwidths together"
            )
        graph.add_edge(edge.source, edge.target)
    parts = sorted(min(part) for part in nx.connected_components(graph))
    if len(parts) > 1:
        raise TopologyError(f"{name}: no way from {parts[0]} to {parts[1]}")
    edges = (
        FabricEdge(
            source=edge.source,
            target=edge.target,
            link=Link(bytes_per_s=edge.bandwidth_per_direction, latency_ps=edge.latency),
            hops=edge.hops,
        )
        for edge in tables
    )
    return Fabric(kind=EXPLICIT, edges=tuple(edges))


READER = FabricReader(kind=EXPLICIT, read=_read)
