"""The links of a cluster by class: what each joins, how many there are, how fast they are."""

import re
from collections import Counter
from dataclasses import dataclass

from zsim.cluster.cluster import Cluster, FabricEdge, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Equal links: `count` of them between `source` and `target`, per direction."""

    source: str
    target: str
    count: int
    link: Link


def link_classes(cluster: Cluster) -> tuple[LinkClass, ...]:
    """All links, from the GPUs up. A full group's uplinks count even where it lacks nodes."""
    found = [
        LinkClass(source="GPU", target="NVSwitch", count=cluster.ranks, link=cluster.switch_link)
    ]
    if cluster.board_link is not None:
        found.append(
            LinkClass(source="board", target="board", count=cluster.nodes, link=cluster.board_link)
        )
    if cluster.pcie_link is not None:
        found.append(
            LinkClass(
                source="GPU", target="PCIe switch", count=cluster.ranks, link=cluster.pcie_link
            )
        )
        switches = cluster.nodes * cluster.pcie_switches
        found.append(
            LinkClass(source="PCIe switch", target="host", count=switches, link=cluster.pcie_link)
        )
    found.append(
        LinkClass(
            source="NIC",
            target=above_nics(cluster),
            count=cluster.nodes * cluster.nics_per_node,
            link=cluster.nic_link,
        )
    )
    return (*found, *_uplinks(cluster), *_edges(cluster))


def above_nics(cluster: Cluster) -> str:
    """What NICs are plugged into."""
    fabric = cluster.fabric
    if fabric.tiers:
        return fabric.tiers[0].name
    return fabric.kind.above_nics


def top_name(cluster: Cluster) -> str:
    """The level above the last tier: what is above leaves is spines, above these cores."""
    return "core" if len(cluster.fabric.tiers) > 1 else "spine"


def rails(cluster: Cluster, tier: int) -> int:
    """Switches of a tier over one group of nodes: one for each rail, or one in all."""
    return cluster.nics_per_node if has_rails(cluster, tier) else 1


def has_rails(cluster: Cluster, tier: int) -> bool:
    """Whether a group of `tier` is one switch for each rail."""
    return cluster.fabric.kind.has_rails(tier)


def rail_count(cluster: Cluster) -> int:
    """Bundles of NICs of a node: those that serve the same GPUs are one."""
    return min(cluster.gpus_per_node, cluster.nics_per_node)


def edges_in_use(cluster: Cluster) -> list[FabricEdge]:
    """Links of an explicit fabric, without those of nodes that the cluster does not have."""
    node = re.compile(r"node(\d+)")
    return [
        edge
        for edge in cluster.fabric.edges
        if not any(
            (found := node.fullmatch(end)) and int(found.group(1)) >= cluster.nodes
            for end in (edge.source, edge.target)
        )
    ]


def _uplinks(cluster: Cluster) -> list[LinkClass]:
    """The way up of each switch of a tier, all its cables as one."""
    found: list[LinkClass] = []
    tiers = cluster.fabric.tiers
    for number, tier in enumerate(tiers):
        above = tiers[number + 1].name if number + 1 < len(tiers) else top_name(cluster)
        switches = rails(cluster, number)
        each = Link(
            bytes_per_s=max(1, int(cluster.uplink_bytes_per_s(number) / switches)),
            latency_ps=tier.latency_ps,
        )
        groups = -(-cluster.nodes // tier.nodes_below)
        found.append(LinkClass(source=tier.name, target=above, count=groups * switches, link=each))
    return found


def _edges(cluster: Cluster) -> list[LinkClass]:
    """Links of an explicit fabric: of nodes, and of switches among each other."""
    counts: Counter[tuple[str, Link]] = Counter()
    for edge in edges_in_use(cluster):
        of_node = {edge.source, edge.target} & {f"node{node}" for node in range(cluster.nodes)}
        counts["node" if of_node else "switch", edge.link] += 1
    return [
        LinkClass(source=source, target="switch", count=count, link=link)
        for (source, link), count in counts.items()
    ]
