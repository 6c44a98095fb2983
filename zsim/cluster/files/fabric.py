"""A fabric as its TOML file describes it, for the node that it is to join.

    title = "Two-level fat tree of 64-port switches"
    kind = "fat_tree"               # or single_switch, rail_optimized, rail_only, explicit
    source = "..."

    [leaf]                          # and [spine] in three levels; the top stands for itself
    ports_down = 32
    oversubscription = 1            # capacity down over capacity up: "3/2", 2, ...
    latency = "260 ns"              # added to a way that goes up from here and comes down again
    source = "..."
    latency_source = "..."

A leaf switch takes `ports_down` NICs. In a fat tree they are all NICs of its nodes, on rails one of
each node. So the number of nodes below a leaf follows from the node; it is rounded down (at least
to 1) such that leaves and NVSwitch domains nest.
"""

from fractions import Fraction
from math import lcm
from typing import Annotated, Any

import networkx as nx
from pydantic import BeforeValidator, Field

from zsim.cluster.cluster import (
    Cluster,
    ClusterError,
    Fabric,
    FabricEdge,
    FabricKind,
    Link,
    Tier,
)
from zsim.cluster.files.table import Bandwidth, Count, Plain, Table, Time, TopologyError, read
from zsim.units import parse_ratio

Ratio = Annotated[Fraction, BeforeValidator(parse_ratio)]


class _TierTable(Table):
    """`[leaf]` and `[spine]`."""

    ports_down: Count
    oversubscription: Ratio = Fraction(1)
    latency: Time
    latency_source: str


Name = Annotated[str, Field(pattern=r"^[\w.:/-]+$")]
"""Of a switch or node: one word."""


class EdgeTable(Plain):
    """`[[edges]]` of an explicit fabric: both directions of a link."""

    source: Name
    target: Name
    bandwidth_per_direction: Bandwidth
    latency: Time


class _FabricFile(Table):
    """The whole file."""

    title: str
    kind: FabricKind
    leaf: _TierTable | None = None
    spine: _TierTable | None = None
    edges: tuple[EdgeTable, ...] = ()


def fabric_of(name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """The fabric that `table`, read from TOML, describes, for nodes like `node`.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
    """
    file = read(_FabricFile, name, table)
    if file.spine is not None and file.leaf is None:
        raise TopologyError(f"{name}: leaf: missing below spine")
    tiers: list[Tier] = []
    nodes_below = 1
    for label, tier in (("leaf", file.leaf), ("spine", file.spine)):
        if tier is None:
            continue
        if label == "leaf":
            per_node = node.nics_per_node if file.kind is FabricKind.FAT_TREE else 1
            nodes_below = nested(tier.ports_down // per_node, node.nodes_per_domain, 1)
        else:
            wanted = nodes_below * tier.ports_down
            nodes_below = nested(wanted, node.nodes_per_domain, nodes_below)
        tiers.append(
            Tier(
                name=label,
                nodes_below=nodes_below,
                oversubscription=tier.oversubscription,
                latency_ps=tier.latency,
            )
        )
    try:
        return Fabric(
            kind=file.kind,
            tiers=tuple(tiers),
            edges=_edges(name, file.edges),
        )
    except ClusterError as error:
        raise TopologyError(f"{name}: {error}") from None


def nested(wanted: int, domain: int, below: int) -> int:
    """The largest number of nodes up to `wanted` that nests with domains and with `below` nodes.

    It is a multiple of `below`, and divides `domain` or is a multiple of it; `below` at least.
    """
    if wanted >= domain:
        step = lcm(domain, below)
        return max(wanted // step, 1) * step
    fitting = (count for count in range(wanted, below, -1) if domain % count == 0)
    return next((count for count in fitting if count % below == 0), below)


def _edges(name: str, tables: tuple[EdgeTable, ...]) -> tuple[FabricEdge, ...]:
    """The edges, all joined and none given twice."""
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
    return tuple(
        FabricEdge(
            source=edge.source,
            target=edge.target,
            link=Link(bytes_per_s=edge.bandwidth_per_direction, latency_ps=edge.latency),
        )
        for edge in tables
    )
