"""Times measured on the ranks of a machine, as tables; `zsim measure` writes them.

Fitted constants are fractions of a data sheet. A machine without a data sheet, such as
processors shared by ranks, has measured times instead, with interpolation between them. The time
of an operation is a constant, a constant for each kernel, and a multiple of the time of its
kernels alone. These are fitted to training steps, in which caches are cold and Python runs
between kernels.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import exp, inf, isfinite, log, prod
from typing import TypeVar

from zsim.dtype import DType, Multiplied
from zsim.model.kernel import Kernel, KernelKind, OperandLayout
from zsim.model.token_loads import balanced
from zsim.schedule.operation import Communication, Compute, Copy, Fill, Operation, Together


class MeasuredTimesError(ValueError):
    """Invalid times; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCurve:
    """Seconds by size, interpolated linearly between the logarithms of both.

    Below the smallest size the time is constant; above the largest it is proportional to the size.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.seconds):
            raise MeasuredTimesError(
                f"sizes: {len(self.sizes)} must be as many as seconds, {len(self.seconds)}, "
                "and at least 1"
            )
        _need_positive("sizes", self.sizes)
        _need_positive("seconds", self.seconds)
        _need_ascending("sizes", self.sizes)

    def at(self, size: float) -> float:
        """Return the seconds of `size`."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        place = bisect_right(self.sizes, size)
        if place == len(self.sizes):
            return self.seconds[-1] * size / self.sizes[-1]
        low, high = self.sizes[place - 1], self.sizes[place]
        share = log(size / low) / log(high / low)
        low_s, high_s = self.seconds[place - 1], self.seconds[place]
        return exp((1 - share) * log(low_s) + share * log(high_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """Seconds of matrix products of a format, m x k with k x n, on a grid of extents.

    `seconds` covers all m, n and k of `extents`, k varying fastest. Between them, interpolation is
    linear in logarithms; beyond the largest, time is proportional to the extent and the batch.
    """

    dtype: DType
    backward: bool
    extents: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.extents) ** 3 or not self.extents:
            raise MeasuredTimesError(
                f"seconds: {len(self.seconds)} must be {len(self.extents)}^3, those of all extents"
            )
        _need_positive("extents", self.extents)
        _need_positive("seconds", self.seconds)
        _need_ascending("extents", self.extents)

    def at(self, batch: int, m: int, n: int, k: int) -> float:
        """Return the seconds of `batch` products of m x k with k x n."""
        axes = [self._between(extent) for extent in (m, n, k)]
        beyond = prod(max(1.0, extent / self.extents[-1]) for extent in (m, n, k))
        found, count = 0.0, len(self.extents)
        for corner in product(*axes):
            weight = prod(share for _, share in corner)
            (first, _), (second, _), (third, _) = corner
            if weight:
                found += weight * log(self.seconds[(first * count + second) * count + third])
        return batch * beyond * exp(found)

    def _between(self, extent: int) -> tuple[tuple[int, float], ...]:
        """Return the indices of the extents around `extent`, with their weights."""
        place = bisect_right(self.extents, extent)
        if place == 0:
            return ((0, 1.0),)
        if place == len(self.extents):
            return ((place - 1, 1.0),)
        low, high = self.extents[place - 1], self.extents[place]
        share = log(extent / low) / log(high / low)
        return ((place - 1, 1 - share), (place, share))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTimes:
    """Seconds of other kernels than products: by bytes, or by FLOPs for attention."""

    kind: KernelKind
    dtype: DType
    backward: bool
    curve: TimeCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """Seconds of schedule operations of one action, in training.

    Attributes:
        name: an action of a Compute, "copy", "fill", or "other" for all remaining operations.
        own_s: seconds of each operation.
        kernel_s: seconds of each kernel of an operation.
        product, moving: factors on the times of its products and of its other kernels alone;
            operations without a list of kernels move the bytes that they touch.
    """

    name: str
    own_s: float = 0.0
    kernel_s: float = 0.0
    product: float = 1.0
    moving: float = 1.0

    def __post_init__(self) -> None:
        _need_finite(self, "own_s", "kernel_s", "product", "moving")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """Seconds of a collective of `ranks` ranks, by the bytes of its whole tensor.

    The time runs from the launch by the host until the host knows of the end. `landing_s` is the
    part of it, for each size, in which the host is busy with the end and runs nothing else: it sums
    received data, divides, and notes the end. It is empty if the host does no such work. `taken_s`
    is the time that concurrent operations on the host lose, since other threads of the rank
    transfer the bytes on its cores. It is empty if it was not measured for each size.
    """

    collective: str
    ranks: int
    curve: TimeCurve
    landing_s: tuple[float, ...] = ()
    taken_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.taken_s:
            TimeCurve(sizes=self.curve.sizes, seconds=self.taken_s)
        if self.landing_s and len(self.landing_s) != len(self.curve.sizes):
            raise MeasuredTimesError(
                f"landing_s: {len(self.landing_s)} must be as many as sizes, "
                f"{len(self.curve.sizes)}"
            )
        for landing, taken in zip(self.landing_s, self.curve.seconds, strict=False):
            if not 0 < landing < taken:
                raise MeasuredTimesError(
                    f"landing_s: {landing} must be more than 0 and less than {taken}, the whole"
                )

    @property
    def landing(self) -> TimeCurve | None:
        """Seconds of the host at the end of the collective, by size; None if it does nothing."""
        return TimeCurve(sizes=self.curve.sizes, seconds=self.landing_s) if self.landing_s else None

    @property
    def taken(self) -> TimeCurve | None:
        """Seconds that concurrent operations lose, by size; None if not measured."""
        return TimeCurve(sizes=self.curve.sizes, seconds=self.taken_s) if self.taken_s else None


OTHER = "other"
"""Name of the cost of operations that have no cost of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of the host to issue an operation, in addition to running it.

    Attributes:
        stream_s: seconds of a Compute, a Copy or a Fill.
        collective_s: seconds of an operation of a communicator, until its launch is done.
        book_s: seconds of an allocation, a free, and every other operation.
        step_s: seconds between two steps, of the training loop around the schedule.
    """

    stream_s: float
    collective_s: float
    book_s: float
    step_s: float = 0.0

    def __post_init__(self) -> None:
        _need_finite(self, "stream_s", "collective_s", "book_s", "step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """All measured times of one rank, while the other ranks did the same.

    Attributes:
        runs_on_host: True if the host itself runs each operation before the next one, and waits
            like a stream, as on CPUs; False for a GPU.
        host: host time to issue operations.
        products, kernels: times of kernels alone, run back to back.
        operations: costs of operations in training, including "other".
        collectives: times by kind, ranks and bytes.
        missing: names of what could not be measured.
        hurried: names of measurements that were repeated too few times.
    """

    runs_on_host: bool
    host: HostTimes
    products: tuple[ProductTimes, ...]
    kernels: tuple[KernelTimes, ...]
    operations: tuple[OperationCost, ...]
    collectives: tuple[CollectiveTimes, ...]
    missing: tuple[str, ...] = ()
    hurried: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if OTHER not in {each.name for each in self.operations}:
            raise MeasuredTimesError(f"operations: {OTHER}: missing")
        kinds = {each.kind for each in self.kernels}
        if KernelKind.ELEMENTWISE not in kinds:
            raise MeasuredTimesError("kernels: elementwise: missing")
        if not self.products:
            raise MeasuredTimesError("products: missing")

    def cost(self, name: str) -> OperationCost:
        """Return the cost of operations called `name`, else that of "other"."""
        found = {each.name: each for each in self.operations}
        return found.get(name, found[OTHER])

    def issue_s(self, operation: Operation) -> float:
        """Return the seconds in which the host issues `operation`, in addition to running it."""
        match operation:
            case Compute() | Copy() | Fill():
                return self.host.stream_s
            case Communication() | Together():
                return self.host.collective_s
            case _:
                return self.host.book_s

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the seconds of `kernel` alone.

        An unmeasured format uses the times of another format; an unmeasured kind uses those of an
        elementwise kernel that moves as many bytes.
        """
        if kernel.kind is KernelKind.MATMUL:
            return self._product_s(kernel)
        if kernel.kind is KernelKind.GROUPED_MATMUL:
            return self._grouped_s(kernel)
        size = kernel.bytes
        if kernel.kind is KernelKind.ATTENTION:
            size = kernel.executed_flops
        curve = self._curve(kernel.kind, kernel.dtype, backward=kernel.backward)
        if curve is None:
            return self.moving_s(kernel.bytes, kernel.dtype)
        return curve.at(size)

    def moving_s(self, size_bytes: int, dtype: Multiplied = DType.FP32) -> float:
        """Return the seconds of an elementwise kernel that moves `size_bytes`."""
        curve = self._curve(KernelKind.ELEMENTWISE, dtype, backward=False)
        assert curve is not None  # checked in __post_init__
        return curve.at(size_bytes)

    def collective_s(self, collective: str, ranks: int, size_bytes: int) -> float | None:
        """Return the seconds of `collective` on a tensor of `size_bytes`; None if not measured.

        For another group size, the time is scaled by the bytes that a ring passes.
        """
        nearest = self._nearest_ranks(collective, ranks)
        if nearest is None:
            return None
        passed = (1 - 1 / ranks) / (1 - 1 / nearest.ranks)
        return nearest.curve.at(size_bytes) * passed

    def landing_s(self, collective: str, ranks: int, size_bytes: int) -> float:
        """Return the part of `collective_s` in which the host is busy with the end."""
        nearest = self._nearest_ranks(collective, ranks)
        if nearest is None or nearest.landing is None:
            return 0.0
        whole_s = self.collective_s(collective, ranks, size_bytes) or 0.0
        return min(nearest.landing.at(size_bytes), whole_s)

    @property
    def takes_from_host(self) -> bool:
        """True if the slowdown of a computing host by collectives was measured."""
        return self.runs_on_host and any(each.taken_s for each in self.collectives)

    def taken_s(self, collective: str, ranks: int, size_bytes: int) -> float:
        """Return the seconds that concurrent operations on the host lose during `collective`."""
        nearest = self._nearest_ranks(collective, ranks)
        if not self.runs_on_host or nearest is None or nearest.taken is None:
            return 0.0
        passed = (1 - 1 / ranks) / (1 - 1 / nearest.ranks)
        return nearest.taken.at(size_bytes) * passed

    def _nearest_ranks(self, collective: str, ranks: int) -> CollectiveTimes | None:
        alike = [each for each in self.collectives if each.collective == collective]
        return min(alike, key=lambda each: (abs(each.ranks - ranks), each.ranks), default=None)

    def _product_s(self, kernel: Kernel) -> float:
        times = _nearest(self.products, kernel.dtype, backward=kernel.backward)
        if len(kernel.shape) == 4:
            batch, m, n, k = kernel.shape
            return times.at(batch, m, n, k)
        side = max(1, round((kernel.flops / 2) ** (1 / 3)))  # unknown shape
        return times.at(1, side, side, side)

    def _grouped_s(self, kernel: Kernel) -> float:
        """Return the sum of the seconds of the products of experts."""
        times = _nearest(self.products, kernel.dtype, backward=kernel.backward)
        count, rows, n, k = kernel.shape
        loads = balanced(rows, count) if kernel.loads is None else kernel.loads
        sums_rows = kernel.layout is OperandLayout.TN
        return sum(
            experts * (times.at(1, n, k, copies) if sums_rows else times.at(1, copies, n, k))
            for experts, copies in loads.groups
            if copies
        )

    def _curve(self, kind: KernelKind, dtype: Multiplied, *, backward: bool) -> TimeCurve | None:
        alike = [each for each in self.kernels if each.kind is kind]
        return _nearest(alike, dtype, backward=backward).curve if alike else None


_Times = TypeVar("_Times", ProductTimes, KernelTimes)


def _nearest(times: Sequence[_Times], dtype: Multiplied, *, backward: bool) -> _Times:
    """Return the times that match the direction and format best."""
    return min(times, key=lambda each: (each.backward is not backward, each.dtype is not dtype))


def _need_positive(name: str, values: Sequence[float]) -> None:
    for value in values:
        if not (isfinite(value) and value > 0):
            raise MeasuredTimesError(f"{name}: {value} must be more than 0")


def _need_finite(costs: OperationCost | HostTimes, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(costs, name) < inf:
            raise MeasuredTimesError(f"{name}: {getattr(costs, name)} must be at least 0")


def _need_ascending(name: str, values: Sequence[float]) -> None:
    for one, other in pairwise(values):
        if one >= other:
            raise MeasuredTimesError(
                f"{name}: {other} must be more than {one}, which stands before it"
            )
