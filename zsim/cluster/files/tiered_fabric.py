"""Files of fabrics with tiers of switches, or with one switch that limits nothing.

    title = "Two-level fat tree of 64-port switches"
    kind = "fat_tree"               # or single_switch, rail_optimized, rail_only
    source = "..."

    [leaf]                          # and [spine] with three levels; the top has no table
    ports_down = 32
    oversubscription = 1            # capacity down over capacity up: "3/2", 2, ...
    latency = "260 ns"              # total latency added by going up from here and down again
    source = "..."
    latency_source = "..."

A leaf switch has `ports_down` ports for NICs. In a fat tree these are all NICs of its nodes, on
rails one NIC of each node. So the number of nodes below a leaf follows from the node; it is rounded
down (at least to 1) such that leaves and NVSwitch domains nest.
"""

from fractions import Fraction
from functools import partial
from math import lcm
from typing import Annotated, Any

from pydantic import BeforeValidator

from zsim.cluster.cluster import Cluster, Fabric, Tier
from zsim.cluster.fabric_kind import (
    FAT_TREE,
    RAIL_ONLY,
    RAIL_OPTIMIZED,
    SINGLE_SWITCH,
    FabricKind,
)
from zsim.cluster.files.fabric_reader import FabricReader, FabricTable
from zsim.cluster.files.table import Count, FileTable, Time, TopologyError, read
from zsim.units import parse_ratio

Ratio = Annotated[Fraction, BeforeValidator(parse_ratio)]


class _TierTable(FileTable):
    """`[leaf]` and `[spine]`."""

    ports_down: Count
    oversubscription: Ratio = Fraction(1)
    latency: Time
    latency_source: str | None = None


class _TieredFile(FabricTable):
    """The whole file."""

    leaf: _TierTable | None = None
    spine: _TierTable | None = None


def _read(kind: FabricKind, name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """Return the fabric with its leaves and spines."""
    file = read(_TieredFile, name, table)
    if file.spine is not None and file.leaf is None:
        raise TopologyError(f"{name}: leaf: missing below spine")
    tiers: list[Tier] = []
    nodes_below = 1
    for label, tier in (("leaf", file.leaf), ("spine", file.spine)):
        if tier is None:
            continue
        if label == "leaf":
            per_node = 1 if kind.on_rails else node.nics_per_node
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
    return Fabric(kind=kind, tiers=tuple(tiers))


def nested(wanted: int, domain: int, below: int) -> int:
    """Return the largest number of nodes up to `wanted` that nests with domains and with `below`.

    It is a multiple of `below`, and divides `domain` or is a multiple of it; at least `below`.
    """
    if wanted >= domain:
        step = lcm(domain, below)
        return max(wanted // step, 1) * step
    fitting = (count for count in range(wanted, below, -1) if domain % count == 0)
    return next((count for count in fitting if count % below == 0), below)


READERS = tuple(
    FabricReader(kind=kind, read=partial(_read, kind))
    for kind in (SINGLE_SWITCH, FAT_TREE, RAIL_OPTIMIZED, RAIL_ONLY)
)
