"""Time of kernels on host threads: bytes of host memory, at the share of it that they reach.

A kernel that runs over tensors larger than the caches takes as long as its memory traffic. Adam
reads four fp32 tensors and writes all of them but the gradient: 28 bytes a parameter, with which
ZeRO-Offload's table 4 (Ren et al. 2021, arXiv 2101.06840) comes to 93 to 127 GB/s on a DGX-2. The
share of the memory's bandwidth that a kernel reaches with all cores is measured, and stands in the
node's description; kernels of several ranks share cores and memory.
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
"""Kernels of the actions of a schedule; every other one on the host is a cast, as copies are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKernelWork:
    """Host memory traffic of a kernel, and the most bytes per second of it on all cores."""

    traffic_bytes: int
    at_most_bytes_per_s: int


def host_kernel_work(kernel: HostKernel, elements: int, cluster: Cluster) -> HostKernelWork:
    """Return what `kernel` over `elements` asks of a node.

    Raises:
        ClusterError: its CPUs are not described.
    """
    host = need_cpu(cluster)
    assert host.cpu is not None
    return HostKernelWork(
        traffic_bytes=BYTES_PER_ELEMENT[kernel] * elements,
        at_most_bytes_per_s=int(host.memory_bytes_per_s * host.cpu.share(kernel)),
    )


def host_kernel_ps(kernel: HostKernel, elements: int, cluster: Cluster, *, ranks: int = 1) -> int:
    """Return picoseconds of `kernel` when so many ranks of a node run as large a one at a time.

    Raises:
        ClusterError: the CPUs of the node are not described.
    """
    work = host_kernel_work(kernel, elements, cluster)
    exact = Fraction(ranks * work.traffic_bytes * PICOSECONDS_PER_SECOND, work.at_most_bytes_per_s)
    return -(-exact.numerator // exact.denominator)


def kernel_of(action: Action) -> HostKernel:
    """Return the kernel by whose rate an action on host memory is timed."""
    return BY_ACTION.get(action, HostKernel.CAST)
