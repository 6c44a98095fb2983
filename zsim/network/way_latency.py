"""Latency of a way from GPU to GPU: of the first byte, over all hops.

GPUs of an NVSwitch domain meet on its switch, NICs hang on the switch, domains meet on a network.
PCIe, boards and what the network is made of are not counted: a backend that simulates them says
what they add. The latency of a NIC is that of its way to the network.
"""

from zsim.cluster.cluster import Cluster


def near_ps(cluster: Cluster) -> int:
    """Return the picoseconds from one GPU to another of its domain: up to the switch, and down."""
    return 2 * cluster.switch_link.latency_ps


def far_ps(cluster: Cluster) -> int:
    """Return the picoseconds to a GPU of another domain: over both switches and two NICs."""
    return near_ps(cluster) + 2 * cluster.nic_link.latency_ps
