"""Time of a kernel, and of every operation that occupies a GPU: the roofline.

Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for
multicore architectures": the time of a kernel is the longer of its arithmetic and its memory
traffic. With fitted constants its efficiency depends on shape (`zsim.compute.fitted_model`). Caches
are not modelled.
"""

from dataclasses import dataclass
from math import ceil
from typing import assert_never

from zsim.cluster.cluster import Gpu
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.compute.fitted_model import Peaks, fitted_s
from zsim.dtype import BlockFormat, DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.access import accesses
from zsim.schedule.operation import BACKWARDS, Action, Compute, Copy, Fill, View
from zsim.schedule.schedule import Program
from zsim.units import PICOSECONDS_PER_SECOND


def _ceil_ps(amount: int, per_second: int) -> int:
    return -(-amount * PICOSECONDS_PER_SECOND // per_second)


def memory_ps(size_bytes: int, gpu: Gpu) -> int:
    """Return the picoseconds to move `size_bytes` to or from device memory, rounded up."""
    return _ceil_ps(size_bytes, gpu.memory_bytes_per_s)


def kernel_ps(kernel: Kernel, gpu: Gpu) -> int:
    """Return the picoseconds of `kernel` on `gpu`, rounded up, without the host's launch.

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
    """Return the peak rates of `gpu` for `kernel`.

    Raises:
        ClusterError: the GPU has no rate for the kernel's format.
    """
    peak = _peak(kernel, gpu) if kernel.kind.multiplies_matrices else 0
    return Peaks(flops=peak, bytes=gpu.memory_bytes_per_s)


def _peak(kernel: Kernel, gpu: Gpu) -> float:
    """Return the peak to which fitted constants are relative.

    They were fitted to 16-bit formats. Narrower floats reach a smaller share of their peak; it is
    scaled by the ratio of the largest achieved rates.
    """
    rate = gpu.rate(kernel.dtype)
    if kernel.dtype is not DType.FP8 and not isinstance(kernel.dtype, BlockFormat):
        return rate.peak_of(kernel.shape)
    half = gpu.rate(DType.BF16)
    return half.peak * rate.matmul / half.matmul


def view_bytes(view: View, program: Program) -> int:
    """Return the bytes of `view`; on an uneven layout, the bytes of the largest rank."""
    return view.size * program.by_name[view.buffer].dtype.size_bytes


def touched_bytes(operation: Compute | Copy | Fill, program: Program) -> int:
    """Return the bytes that `operation` reads and writes; in-place updates count twice."""
    match operation:
        case Fill(target=target):
            return view_bytes(target, program)
        case Copy(source=source, target=target, accumulate=accumulate):
            # By parameter the sizes may differ; no more is moved than the smaller one has.
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
    """Seconds of the kernels of an operation alone: products, and kernels that move memory.

    An operation without a list of kernels moves the bytes it touches.
    """

    count: int
    product_s: float
    moving_s: float


def kernel_sums(
    operation: Compute | Copy | Fill, program: Program, times: MeasuredTimes
) -> KernelSums:
    """Return the sums of measured `times` over the kernels of `operation`."""
    kernels = operation.kernels if isinstance(operation, Compute) else ()
    if not kernels:
        moving_s = times.moving_s(touched_bytes(operation, program))
        return KernelSums(count=0, product_s=0.0, moving_s=moving_s)
    products = (KernelKind.MATMUL, KernelKind.GROUPED_MATMUL)
    taken = [(kernel.kind in products, times.kernel_s(kernel)) for kernel in kernels]
    return KernelSums(
        count=len(kernels),
        product_s=sum(seconds for is_product, seconds in taken if is_product),
        moving_s=sum(seconds for is_product, seconds in taken if not is_product),
    )


def cost_name(operation: Compute | Copy | Fill) -> str:
    """Return the name of the cost of `operation` in measured times."""
    if isinstance(operation, Compute):
        return Action.BACKWARD if operation.action in BACKWARDS else operation.action
    return "copy" if isinstance(operation, Copy) else "fill"


def _measured_s(operation: Compute | Copy | Fill, program: Program, times: MeasuredTimes) -> float:
    sums, cost = kernel_sums(operation, program, times), times.cost(cost_name(operation))
    of_kernels = cost.kernel_s * sums.count
    return cost.own_s + of_kernels + cost.product * sums.product_s + cost.moving * sums.moving_s


def moving_ps(operation: Compute | Copy | Fill, program: Program, gpu: Gpu) -> int:
    """Return the part of `operation_ps` in which kernels run that only move memory.

    Raises:
        ClusterError: the GPU has no rate for the format of a kernel.
    """
    if gpu.measured is not None and gpu.measured.runs_on_host:
        return 0  # a collective uses cores, whatever kernel runs on them
    if isinstance(operation, Compute) and operation.kernels:
        moving = (kernel for kernel in operation.kernels if not kernel.kind.multiplies_matrices)
        return sum(kernel_ps(kernel, gpu) for kernel in moving)
    return operation_ps(operation, program, gpu)


def joined_bytes(copy: Copy, program: Program) -> int:
    """Return the extra bytes if the kernels that compute the source of `copy` add it to the target.

    The source is then neither written nor read. The extra bytes of products that add gradients are
    not hidden: with sums in fp32, four bytes more per element than in bf16, 82 products of a B200
    take longer by as much as 7.9 TB/s of its 8 predict (MooreThreads/SimuMax,
    configs/system/b200_bf16_ceperm.json at 4dcaae5, shapes with `accumulate=True` in both formats).
    """
    return max(0, touched_bytes(copy, program) - 2 * view_bytes(copy.source, program))


def operation_ps(operation: Compute | Copy | Fill, program: Program, gpu: Gpu) -> int:
    """Return the picoseconds that `operation` occupies the GPU.

    A Compute runs its kernels in sequence. A Compute without kernels, a Copy and a Fill take the
    time of their memory traffic. With fitted constants, each launch of a Copy but the first adds
    the fixed time of a kernel. A Copy without launches is done by the kernels that compute its
    source, and takes the time of their extra bytes: `joined_bytes`.

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
