"""Rates of traffic on the host side of a node when several ranks move as much at a time.

What the simulation's fair shares come to where all flows are equal: the link with the most to carry
for its bandwidth decides.
"""

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction

from zsim.cluster.cluster import Cluster
from zsim.cluster.host_links import HostFlow, Level, host_links, load_of, path
from zsim.cluster.links import link_classes


def equal_bytes_per_s(cluster: Cluster, flows: Mapping[HostFlow, int]) -> Fraction:
    """Return bytes per second of each flow, if of each kind so many ranks of a node have one.

    They are the first ranks of the node, and all flows go at one rate.

    Raises:
        ClusterError: the node lacks what a flow needs, or describes no link that carries it.
    """
    speeds = {
        name: each.bytes_per_s
        for each in (*link_classes(cluster), *host_links(cluster))
        for names in each.hops
        for name in names
    }
    taken: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)
    for flow, ranks in flows.items():
        for name, level in path(cluster, flow):
            for rank in range(ranks):
                taken[name, _number(cluster, rank, level)] += load_of(cluster, flow, name)
    return min(speeds[name] / total for (name, _), total in taken.items())


def _number(cluster: Cluster, rank: int, level: Level) -> int:
    """Return which link of a level the `rank` of a node is on."""
    per_switch = cluster.gpus_per_pcie_switch
    ranks = {
        Level.RANK: 1,
        Level.PCIE_SWITCH: per_switch,
        Level.ROOT_PORT: cluster.gpus_per_root_port or per_switch,
        Level.NODE: cluster.gpus_per_node,
    }
    return rank // ranks[level]


def node_copy_bytes_per_s(cluster: Cluster, *, outward: bool) -> Fraction:
    """Return what copies of all GPUs of a node move together in one direction.

    Raises:
        ClusterError: no link between GPUs and host memory is described.
    """
    flow = HostFlow.COPY_OUT if outward else HostFlow.COPY_IN
    count = cluster.gpus_per_node
    return count * equal_bytes_per_s(cluster, {flow: count})
