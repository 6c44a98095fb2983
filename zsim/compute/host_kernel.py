"""Time of kernels on host threads: bytes of host memory, at a measured share of its bandwidth.

A kernel over tensors larger than the caches takes as long as its memory traffic. Adam reads four
fp32 tensors and writes three of them, all but the gradient: 28 bytes a parameter. With this,
ZeRO-Offload's table 4 (Ren et al. 2021, arXiv 2101.06840) gives 93 to 127 GB/s on a DGX-2. The
share of memory bandwidth that a kernel reaches with all cores is measured, and part of the node's
description. Kernels of several ranks share cores and memory.
"""

from dataclasses import dataclass
from fractions import Fraction

from zsim.cluster.cluster import Cluster
from zsim.cluster.host_links import need_cpu
from zsim.cluster.host_side import HostKernel
from zsim.schedule.operation import Action
from zsim.units import PICOSECONDS_PER_SECOND

BYTES_PER_ELEMENT = {
    HostKernel.ADAM: 28,
    HostKernel.UNSCALE: 8,
    HostKernel.CAST: 6,
    HostKernel.NORM: 4,
}
"""fp32 tensors, read and written once each: Adam 4 x 4 + 3 x 4, unscale in place 4 + 4, cast to 16
bits 4 + 2, norm 4."""

BY_ACTION = {
    Action.UPDATE: HostKernel.ADAM,
    Action.UNSCALE: HostKernel.UNSCALE,
    Action.CLIP: HostKernel.UNSCALE,
    Action.NORM: HostKernel.NORM,
    Action.FINITE: HostKernel.NORM,
}
"""Kernels of the actions of a schedule; all other host operations, such as copies, are casts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKernelWork:
    """Host memory traffic of a kernel, and its maximum bytes per second on all cores."""

    traffic_bytes: int
    at_most_bytes_per_s: int


def host_kernel_work(kernel: HostKernel, elements: int, cluster: Cluster) -> HostKernelWork:
    """Return the traffic and the maximum rate of `kernel` over `elements`.

    Raises:
        ClusterError: the CPUs of the node are not described.
    """
    host = need_cpu(cluster)
    assert host.cpu is not None
    return HostKernelWork(
        traffic_bytes=BYTES_PER_ELEMENT[kernel] * elements,
        at_most_bytes_per_s=int(host.memory_bytes_per_s * host.cpu.share(kernel)),
    )


def host_kernel_ps(kernel: HostKernel, elements: int, cluster: Cluster, *, ranks: int = 1) -> int:
    """Return the picoseconds of `kernel` if `ranks` of a node run it at the same time.

    Raises:
        ClusterError: the CPUs of the node are not described.
    """
    work = host_kernel_work(kernel, elements, cluster)
    exact = Fraction(ranks * work.traffic_bytes * PICOSECONDS_PER_SECOND, work.at_most_bytes_per_s)
    return -(-exact.numerator // exact.denominator)


def kernel_of(action: Action) -> HostKernel:
    """Return the kernel whose rate an action on host memory has."""
    return BY_ACTION.get(action, HostKernel.CAST)
