"""Rates of traffic on the host side of a node when several ranks move equal bytes.

This equals the fair shares of the simulation if all flows are equal: the link with the largest load
relative to its bandwidth decides.
"""

from collections import defaultdict
from collections.abc import Mapping
from fractions import Fraction

from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.host_links import HostFlow, Level, host_links, load_of, path
from zsim.cluster.links import link_classes


def equal_bytes_per_s(cluster: Cluster, flows: Mapping[HostFlow, int]) -> Fraction:
    """Return bytes per second of each flow, if `flows` has the number of ranks for each kind.

    They are the first ranks of the node, and all flows have the same rate.

    Raises:
        ClusterError: the node lacks hardware for a flow, or describes no link that carries it.
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
    if not taken:
        raise ClusterError(f"{cluster.name}: no link between GPUs and host memory is described")
    return min(speeds[name] / total for (name, _), total in taken.items())


def _number(cluster: Cluster, rank: int, level: Level) -> int:
    """Return the number of the link of a level that the `rank` of a node uses."""
    per_switch = cluster.gpus_per_pcie_switch
    ranks = {
        Level.RANK: 1,
        Level.PCIE_SWITCH: per_switch,
        Level.ROOT_PORT: cluster.gpus_per_root_port or per_switch,
        Level.NODE: cluster.gpus_per_node,
    }
    return rank // ranks[level]


def node_copy_bytes_per_s(cluster: Cluster, *, outward: bool) -> Fraction:
    """Return bytes per second of copies of all GPUs of a node together in one direction.

    Raises:
        ClusterError: no link between GPUs and host memory is described.
    """
    flow = HostFlow.COPY_OUT if outward else HostFlow.COPY_IN
    count = cluster.gpus_per_node
    return count * equal_bytes_per_s(cluster, {flow: count})
