"""Time of a kernel, and of every operation that occupies a GPU: the roofline.

Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures": a kernel takes as long as the slower of its arithmetic and its memory
traffic. Efficiency by shape, caches and slowdown beside a collective are not modelled.
"""

from typing import assert_never

from zsim.access import accesses
from zsim.cluster import Gpu
from zsim.kernel import Kernel, KernelKind
from zsim.operation import Compute, Copy, Fill, View
from zsim.schedule import Program
from zsim.units import PICOSECONDS_PER_SECOND


def _ceil_ps(amount: int, per_second: int) -> int:
    return -(-amount * PICOSECONDS_PER_SECOND // per_second)


def memory_ps(size_bytes: int, gpu: Gpu) -> int:
    """Picoseconds to move `size_bytes` to or from device memory, rounded up."""
    return _ceil_ps(size_bytes, gpu.memory_bytes_per_s)


def kernel_ps(kernel: Kernel, gpu: Gpu) -> int:
    """Picoseconds of `kernel` on `gpu`, rounded up; without the launch, which the host pays.

    Raises:
        ClusterError: the GPU has no rate for the kernel's format.
    """
    traffic_ps = memory_ps(kernel.bytes, gpu)
    if not kernel.flops:
        return traffic_ps
    rate = gpu.rate(kernel.dtype)
    per_second = rate.matmul if kernel.kind is KernelKind.MATMUL else rate.elementwise
    return max(_ceil_ps(kernel.flops, per_second), traffic_ps)


def view_bytes(view: View, program: Program) -> int:
    """Bytes of `view`; of a window on an uneven layout the whole window, which no rank exceeds."""
    return view.size * program.by_name[view.buffer].dtype.size_bytes


def touched_bytes(operation: Compute | Copy | Fill, program: Program) -> int:
    """Bytes that `operation` reads and writes; what it updates in place counts twice."""
    match operation:
        case Fill(target=target):
            return view_bytes(target, program)
        case Copy(source=source, target=target, accumulate=accumulate):
            written = view_bytes(target, program)
            return view_bytes(source, program) + (2 if accumulate else 1) * written
        case Compute():
            return sum(
                (access.reads + access.writes) * view_bytes(access.view, program)
                for access in accesses(operation)
            )
        case _:
            assert_never(operation)


def operation_ps(operation: Compute | Copy | Fill, program: Program, gpu: Gpu) -> int:
    """Picoseconds that `operation` occupies the GPU.

    A Compute takes its kernels one after the other. One that names none, a Copy and a Fill take the
    memory traffic of the views that they touch.

    Raises:
        ClusterError: the GPU has no rate for the format of a kernel.
    """
    if isinstance(operation, Compute) and operation.kernels:
        return sum(kernel_ps(kernel, gpu) for kernel in operation.kernels)
    return memory_ps(touched_bytes(operation, program), gpu)
