"""Time of a kernel, and of every operation that occupies a GPU: the roofline.

Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures": a kernel takes as long as the slower of its arithmetic and its memory
traffic. With fitted constants its efficiency depends on shape (`zsim.compute.fitted_model`). Caches
are not modelled.
"""

from dataclasses import dataclass
from math import ceil
from typing import assert_never

from zsim.cluster.cluster import Gpu
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.compute.fitted_model import Peaks, fitted_s
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.access import accesses
from zsim.schedule.operation import BACKWARDS, Action, Compute, Copy, Fill, View
from zsim.schedule.schedule import Program
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
    if kernel.recorded_ps:
        return kernel.recorded_ps
    if gpu.measured is not None:
        return ceil(gpu.measured.kernel_s(kernel) * PICOSECONDS_PER_SECOND)
    if gpu.kernels is not None:
        return ceil(fitted_s(kernel, peaks_of(kernel, gpu), gpu.kernels) * PICOSECONDS_PER_SECOND)
    traffic_ps = memory_ps(kernel.bytes, gpu)
    flops = kernel.executed_flops
    if not flops:
        return traffic_ps
    rate = gpu.rate(kernel.dtype)
    per_second = rate.matmul if kernel.kind.multiplies_matrices else rate.elementwise
    return max(_ceil_ps(flops, per_second), traffic_ps)


def peaks_of(kernel: Kernel, gpu: Gpu) -> Peaks:
    """Return what `gpu` does at most for `kernel`.

    Raises:
        ClusterError: the GPU has no rate for the kernel's format.
    """
    peak = _peak(kernel, gpu) if kernel.kind.multiplies_matrices else 0
    return Peaks(flops=peak, bytes=gpu.memory_bytes_per_s)


def _peak(kernel: Kernel, gpu: Gpu) -> float:
    """Return the peak that fitted constants are shares of.

    They were fitted to 16-bit formats. 8-bit floats reach less of their peak: as much less as the
    two largest achieved rates say.
    """
    rate = gpu.rate(kernel.dtype)
    if kernel.dtype is not DType.FP8:
        return rate.peak_of(kernel.shape)
    half = gpu.rate(DType.BF16)
    return half.peak * rate.matmul / half.matmul


def view_bytes(view: View, program: Program) -> int:
    """Bytes of `view`; of a window on an uneven layout the whole window, which no rank exceeds."""
    return view.size * program.by_name[view.buffer].dtype.size_bytes


def touched_bytes(operation: Compute | Copy | Fill, program: Program) -> int:
    """Bytes that `operation` reads and writes; what it updates in place counts twice."""
    match operation:
        case Fill(target=target):
            return view_bytes(target, program)
        case Copy(source=source, target=target, accumulate=accumulate):
            # By parameter the sizes may differ, and no more is moved than the smaller has.
            moved = min(source.size, target.size)
            each = program.by_name[target.buffer].dtype.size_bytes * (2 if accumulate else 1)
            return moved * (program.by_name[source.buffer].dtype.size_bytes + each)
        case Compute():
            return sum(
                (access.reads + access.writes) * view_bytes(access.view, program)
                for access in accesses(operation)
            )
        case _:
            assert_never(operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSums:
    """What the kernels of an operation take alone, in seconds: products, and all that move memory.

    An operation without a list of kernels is one that moves the bytes it touches.
    """

    count: int
    product_s: float
    moving_s: float


def kernel_sums(
    operation: Compute | Copy | Fill, program: Program, times: MeasuredTimes
) -> KernelSums:
    """Return what `times` say of the kernels of `operation`."""
    kernels = operation.kernels if isinstance(operation, Compute) else ()
    if not kernels:
        moving_s = times.moving_s(touched_bytes(operation, program))
        return KernelSums(count=0, product_s=0.0, moving_s=moving_s)
    taken = [(kernel.kind is KernelKind.MATMUL, times.kernel_s(kernel)) for kernel in kernels]
    return KernelSums(
        count=len(kernels),
        product_s=sum(seconds for is_product, seconds in taken if is_product),
        moving_s=sum(seconds for is_product, seconds in taken if not is_product),
    )


def cost_name(operation: Compute | Copy | Fill) -> str:
    """Return what the cost of `operation` is called in measured times."""
    if isinstance(operation, Compute):
        return Action.BACKWARD if operation.action in BACKWARDS else operation.action
    return "copy" if isinstance(operation, Copy) else "fill"


def _measured_s(operation: Compute | Copy | Fill, program: Program, times: MeasuredTimes) -> float:
    sums, cost = kernel_sums(operation, program, times), times.cost(cost_name(operation))
    of_kernels = cost.kernel_s * sums.count
    return cost.own_s + of_kernels + cost.product * sums.product_s + cost.moving * sums.moving_s


def moving_ps(operation: Compute | Copy | Fill, program: Program, gpu: Gpu) -> int:
    """Return those picoseconds of `operation_ps` in which kernels run that only move memory.

    Raises:
        ClusterError: the GPU has no rate for the format of a kernel.
    """
    if gpu.measured is not None and gpu.measured.runs_on_host:
        return 0  # a collective takes cores, whatever runs on them
    if isinstance(operation, Compute) and operation.kernels:
        moving = (kernel for kernel in operation.kernels if not kernel.kind.multiplies_matrices)
        return sum(kernel_ps(kernel, gpu) for kernel in moving)
    return operation_ps(operation, program, gpu)


def joined_bytes(copy: Copy, program: Program) -> int:
    """Return what kernels that make the source of `copy` move more if they add it to the target.

    The source is neither written nor read. Of products that add gradients nothing hides it: with
    sums in fp32, four bytes more an element than in bf16, 82 products of a B200 take longer by as
    much as 7.9 TB/s of its 8 are (MooreThreads/SimuMax, configs/system/b200_bf16_ceperm.json at
    4dcaae5, shapes with `accumulate=True` in both formats).
    """
    return max(0, touched_bytes(copy, program) - 2 * view_bytes(copy.source, program))


def operation_ps(operation: Compute | Copy | Fill, program: Program, gpu: Gpu) -> int:
    """Picoseconds that `operation` occupies the GPU.

    A Compute takes its kernels one after the other. One that names none, a Copy and a Fill take the
    memory traffic of the views that they touch; where constants are fitted, each launch of a Copy
    but the first has the few microseconds of its own that any kernel has. A Copy without one is
    what the kernels that make its source move more than they did: `joined_bytes`.

    Raises:
        ClusterError: the GPU has no rate for the format of a kernel.
    """
    if gpu.measured is not None:
        return ceil(_measured_s(operation, program, gpu.measured) * PICOSECONDS_PER_SECOND)
    if isinstance(operation, Compute) and operation.kernels:
        return sum(kernel_ps(kernel, gpu) for kernel in operation.kernels)
    if isinstance(operation, Copy) and not operation.launches:
        return memory_ps(joined_bytes(operation, program), gpu)
    own_ps = 0
    if isinstance(operation, Copy) and gpu.kernels is not None:
        own_ps = round((operation.launches - 1) * gpu.kernels.fixed_s * PICOSECONDS_PER_SECOND)
    traffic_ps = memory_ps(touched_bytes(operation, program), gpu)
    if gpu.kernels is not None:
        traffic_ps = ceil(traffic_ps / gpu.kernels.copying)
    return traffic_ps + own_ps
