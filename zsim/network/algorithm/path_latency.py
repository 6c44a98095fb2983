"""Latency of the first byte from GPU to GPU, over all hops.

GPUs of an NVSwitch domain meet on its switch, NICs are attached to the switch, and domains meet on
a network. PCIe, boards and the parts of the network are not counted: a backend that simulates them
adds their latency. The latency of a NIC includes its link to the network.
"""

from zsim.cluster.cluster import Cluster


def near_ps(cluster: Cluster) -> int:
    """Return the picoseconds from one GPU to another of its domain: up to the switch, and down."""
    return 2 * cluster.switch_link.latency_ps


def far_ps(cluster: Cluster) -> int:
    """Return the picoseconds to a GPU of another domain: over both switches and two NICs."""
    return near_ps(cluster) + 2 * cluster.nic_link.latency_ps
