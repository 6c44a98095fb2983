"""The kinds of links of a cluster: what they are called, how many there are, how fast they are."""

from dataclasses import dataclass
from fractions import Fraction

from zsim.cluster.cluster import Cluster
from zsim.cluster.links import edges_in_use, has_rails, rail_count
from zsim.network.link_graph import NETWORK

TO_SWITCH, FROM_SWITCH = "gpu->switch", "switch->gpu"
TO_PCIE, FROM_PCIE = "gpu->pcie", "pcie->gpu"
TO_HOST, FROM_HOST = "pcie->host", "host->pcie"
BOARD = "board->board"


@dataclass(frozen=True, slots=True)
class LinkKind:
    """`count` equal links; each number stands for `multiple` links of one load.

    `names` are the hops that they are: those of a NIC carry the same bytes at the same rate, so
    they limit as one.
    """

    names: tuple[str, ...]
    count: int
    bytes_per_s: Fraction
    multiple: Fraction = Fraction(1)


def link_kinds(cluster: Cluster) -> list[LinkKind]:
    """All kinds, one per direction.

    Links of GPUs to their switch and to PCIe, by rank; of PCIe switches to the host, by node and
    switch, one as fast as a GPU's; between boards, two by node; NICs, by node
    and bundle; uplinks of each tier, by group and perhaps rail; the edges of an explicit fabric.
    """
    whole, ranks = Fraction(1), cluster.ranks
    speed = Fraction(cluster.switch_link.bytes_per_s)
    found = [LinkKind((name,), ranks, speed) for name in (TO_SWITCH, FROM_SWITCH)]
    if cluster.pcie_link is not None:
        speed = Fraction(cluster.pcie_link.bytes_per_s)
        found += [LinkKind((name,), ranks, speed) for name in (TO_PCIE, FROM_PCIE)]
        switches = cluster.nodes * cluster.pcie_switches
        found += [LinkKind((name,), switches, speed) for name in (TO_HOST, FROM_HOST)]
    if cluster.board_link is not None:
        speed = Fraction(cluster.board_link.bytes_per_s)
        found.append(LinkKind((BOARD,), 2 * cluster.nodes, speed))
    rails = rail_count(cluster)
    width = Fraction(cluster.nics_per_node, rails)
    above = [*(tier.name for tier in cluster.fabric.tiers), NETWORK]
    speed = Fraction(cluster.nic_link.bytes_per_s)
    for names in (("switch->nic", f"nic->{above[0]}"), (f"{above[0]}->nic", "nic->switch")):
        found.append(LinkKind(names, cluster.nodes * rails, speed, width))
    for number, tier in enumerate(cluster.fabric.tiers):
        groups = -(-cluster.nodes // tier.nodes_below)
        speed, multiple = cluster.uplink_bytes_per_s(number), whole
        if has_rails(cluster, number):
            groups, speed, multiple = groups * rails, speed / cluster.nics_per_node, width
        low, high = above[number : number + 2]
        found.append(LinkKind((f"{low}->{high}",), groups, speed, multiple))
        found.append(LinkKind((f"{high}->{low}",), groups, speed, multiple))
    for edge in edges_in_use(cluster):
        speed = Fraction(edge.link.bytes_per_s)
        for one, other in ((edge.source, edge.target), (edge.target, edge.source)):
            found.append(LinkKind((f"{one}->{other}",), 1, speed))
    return found
