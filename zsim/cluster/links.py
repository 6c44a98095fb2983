"""The links of a cluster by class: their ends, number and speed.

It is the only list of links: tables and pictures show it, and the simulation numbers its links.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.cluster.cluster import Cluster, FabricEdge, Link

TO_SWITCH, FROM_SWITCH = "gpu->switch", "switch->gpu"
TO_PCIE, FROM_PCIE = "gpu->pcie", "pcie->gpu"
TO_ROOT, FROM_ROOT = "pcie->root", "root->pcie"
TO_HOST, FROM_HOST = "pcie->host", "host->pcie"
FROM_ROOT_TO_HOST, FROM_HOST_TO_ROOT = "root->host", "host->root"
BOARD = "board->board"
TO_NIC, FROM_NIC = "switch->nic", "nic->switch"
NETWORK = "network"
"""Name of the level above the last tier."""
_NODE = re.compile(r"node(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """Equal links between `source` and `target`.

    Attributes:
        count: number of links.
        link: one link, per direction, in whole bytes per second; `bytes_per_s` is exact.
        hops: names of the hops on a path, by direction. Hops of a NIC carry the same bytes at the
            same rate, so they count as one limit. A number distinguishes both directions of a name.
        loads: number of links of each name in `hops` with a different load. Each load has
            `multiple` links.
        carries_bytes: True if its traffic is counted in bytes; False if it represents busy time.
    """

    source: str
    target: str
    count: int
    link: Link
    bytes_per_s: Fraction
    hops: tuple[tuple[str, ...], ...]
    loads: int
    multiple: Fraction = Fraction(1)
    carries_bytes: bool = True


def link_classes(cluster: Cluster) -> Iterator[LinkClass]:
    """Yield all classes of links, from the GPUs up.

    Links of GPUs to their switch and to PCIe are numbered by rank. Links of PCIe switches to the
    host, or to a shared root port, are as fast as a GPU's, and numbered by node and switch. Links
    between boards are two per node. NICs are numbered by node and bundle; uplinks of each tier by
    group (also an incomplete one) and by rail, if it has rails. Each edge of an explicit fabric is
    a class.
    """
    ranks, nodes = cluster.ranks, cluster.nodes
    yield _equal("GPU", "NVSwitch", ranks, cluster.switch_link, hops=((TO_SWITCH,), (FROM_SWITCH,)))
    if (pcie := cluster.pcie_link) is not None:
        yield _equal("GPU", "PCIe switch", ranks, pcie, hops=((TO_PCIE,), (FROM_PCIE,)))
        switches = nodes * cluster.pcie_switches
        if cluster.gpus_per_root_port is None:
            yield _equal("PCIe switch", "host", switches, pcie, hops=((TO_HOST,), (FROM_HOST,)))
        else:
            to_port = (TO_ROOT,), (FROM_ROOT,)
            yield _equal("PCIe switch", "root port", switches, pcie, hops=to_port)
            from_port = (FROM_ROOT_TO_HOST,), (FROM_HOST_TO_ROOT,)
            yield _equal("root port", "host", nodes * cluster.root_ports, pcie, hops=from_port)
    if cluster.board_link is not None:
        found = _equal("board", "board", nodes, cluster.board_link, hops=((BOARD,),))
        yield replace(found, loads=2 * nodes)
    bundles = rail_count(cluster)
    width = Fraction(cluster.nics_per_node, bundles)
    tiers = cluster.fabric.tiers
    above = [*(tier.name for tier in tiers), NETWORK]
    hops = (TO_NIC, f"nic->{above[0]}"), (f"{above[0]}->nic", FROM_NIC)
    nics = nodes * cluster.nics_per_node
    found = _equal("NIC", above_nics(cluster), nics, cluster.nic_link, hops=hops)
    yield replace(found, loads=nodes * bundles, multiple=width)
    shown = [*(tier.name for tier in tiers), top_name(cluster)]
    for number, tier in enumerate(tiers):
        groups, switches = -(-nodes // tier.nodes_below), rails(cluster, number)
        per_rail = has_rails(cluster, number)
        speed = cluster.uplink_bytes_per_s(number) / switches
        low, high = above[number : number + 2]
        yield LinkClass(
            source=tier.name,
            target=shown[number + 1],
            count=groups * switches,
            link=Link(bytes_per_s=max(1, int(speed)), latency_ps=tier.latency_ps),
            bytes_per_s=speed,
            hops=((f"{low}->{high}",), (f"{high}->{low}",)),
            loads=groups * bundles if per_rail else groups,
            multiple=width if per_rail else Fraction(1),
        )
    for edge in edges_in_use(cluster):
        source, target = sorted(map(_end, (edge.source, edge.target)))
        there, back = f"{edge.source}->{edge.target}", f"{edge.target}->{edge.source}"
        yield _equal(source, target, 1, edge.link, hops=((there,), (back,)))


def summed_up(classes: Iterable[LinkClass]) -> tuple[LinkClass, ...]:
    """Merge classes with the same ends and speed, in order of their first."""
    counts: Counter[tuple[str, str, Link]] = Counter()
    firsts: dict[tuple[str, str, Link], LinkClass] = {}
    for each in classes:
        key = each.source, each.target, each.link
        counts[key] += each.count
        firsts.setdefault(key, each)
    return tuple(replace(each, count=counts[key]) for key, each in firsts.items())


def _equal(
    source: str, target: str, count: int, link: Link, *, hops: tuple[tuple[str, ...], ...]
) -> LinkClass:
    return LinkClass(
        source=source,
        target=target,
        count=count,
        link=link,
        bytes_per_s=Fraction(link.bytes_per_s),
        hops=hops,
        loads=count,
    )


def _end(name: str) -> str:
    return "node" if _NODE.fullmatch(name) else "switch"


def above_nics(cluster: Cluster) -> str:
    """Return the name of the level above the NICs."""
    fabric = cluster.fabric
    if fabric.tiers:
        return fabric.tiers[0].name
    return fabric.kind.above_nics


def top_name(cluster: Cluster) -> str:
    """Return the name of the top level: cores above spines, else spines."""
    return "core" if len(cluster.fabric.tiers) > 1 else "spine"


def rails(cluster: Cluster, tier: int) -> int:
    """Return the switches of a tier above one group of nodes: one for each rail, or one in all."""
    return cluster.nics_per_node if has_rails(cluster, tier) else 1


def has_rails(cluster: Cluster, tier: int) -> bool:
    """Return True if a group of `tier` has one switch for each rail."""
    return cluster.fabric.kind.has_rails(tier)


def rail_count(cluster: Cluster) -> int:
    """Return the bundles of NICs of a node; NICs that serve the same GPUs are one bundle."""
    return min(cluster.gpus_per_node, cluster.nics_per_node)


def edges_in_use(cluster: Cluster) -> list[FabricEdge]:
    """Return the edges of the fabric, except edges of nodes beyond the cluster.

    Nodes that pass on bytes for others (`forwarding`) stay.
    """
    edges = cluster.fabric.edges
    relays = forwarding(edges)
    return [
        edge
        for edge in edges
        if not any(
            (found := _NODE.fullmatch(end))
            and int(found.group(1)) >= cluster.nodes
            and end not in relays
            for end in (edge.source, edge.target)
        )
    ]


def forwarding(edges: Iterable[FabricEdge]) -> set[str]:
    """Return the nodes that pass on bytes for others: those joined to other nodes, as in a torus.

    A node with links to switches alone is a host, which does not.
    """
    return {
        end
        for edge in edges
        if _NODE.fullmatch(edge.source) and _NODE.fullmatch(edge.target)
        for end in (edge.source, edge.target)
    }
