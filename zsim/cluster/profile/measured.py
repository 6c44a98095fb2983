"""Times that were measured on the ranks at hand, as tables: what `zsim measure` writes.

Fitted constants say what share of a data sheet a kind of GPU reaches. Of a machine without a data
sheet, such as processors that ranks share, times themselves are kept, and what lies between two of
them is interpolated. An operation takes a part of its own, a part for each kernel, and a multiple
of what its kernels took alone: these are fitted to steps of a training, in which caches are cold
and Python runs between kernels.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import exp, inf, isfinite, log, prod
from typing import TypeVar

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.operation import Communication, Compute, Copy, Fill, Operation, Together


class MeasuredTimesError(ValueError):
    """Times that cannot be; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeCurve:
    """Seconds by size. Between two sizes the logarithms of both lie on a straight line.

    Below the smallest size the time is that of it; above the largest it grows with the size.
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
    """Seconds of products of matrices of a format, m x k with k x n, on a grid of extents.

    `seconds` has all m, n and k of `extents`, k the fastest. Between them it is linear in
    logarithms, beyond the largest it grows with the extent; each of a batch takes as long.
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
        """Return the places of the extents around `extent`, with the share that each counts."""
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
    """Seconds of kernels of a kind that are no products: by bytes, of attention by FLOPs."""

    kind: KernelKind
    dtype: DType
    backward: bool
    curve: TimeCurve


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCost:
    """Seconds of the operations of a schedule that do one thing, in a training.

    Attributes:
        name: an action of a Compute, "copy", "fill", or "other" for all that are not named.
        own_s: of each operation.
        kernel_s: of each of its kernels.
        product, moving: times its products of matrices, and its other kernels, take of what they
            take alone; operations without a list of kernels move the bytes that they touch.
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
    """Seconds of a collective of so many ranks, by the bytes of its whole tensor.

    From when its host has handed it over until the host has learnt of its end. In `landing_s` of
    them, for each size, the host runs nothing else, however long ago the last byte has come: it
    sums what came, divides, and notes the end. None are given where the host has no part in it.
    `taken_s` is what operations lose that the host runs meanwhile: other threads of the rank carry
    the bytes, on its cores. None are given where that was not measured for each size.
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
        """The host's part by size."""
        return TimeCurve(sizes=self.curve.sizes, seconds=self.landing_s) if self.landing_s else None

    @property
    def taken(self) -> TimeCurve | None:
        """What it takes from operations beside it, by size."""
        return TimeCurve(sizes=self.curve.sizes, seconds=self.taken_s) if self.taken_s else None


OTHER = "other"
"""Cost of operations that are not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of the host for an operation, beside those in which it runs it itself.

    Attributes:
        stream_s: of a Compute, a Copy or a Fill.
        collective_s: of an operation of a communicator, until it is handed over.
        book_s: of an allocation, a free, and all else.
        step_s: from the end of a step until the next one begins: the loop around the schedule.
    """

    stream_s: float
    collective_s: float
    book_s: float
    step_s: float = 0.0

    def __post_init__(self) -> None:
        _need_finite(self, "stream_s", "collective_s", "book_s", "step_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """All times that were measured of one rank, while the others did the same.

    Attributes:
        runs_on_host: the host is the stream: it runs each operation itself before it goes on, and
            waits where a stream would, as on processors; False of a GPU.
        host: what its operations cost the host.
        products, kernels: kernels alone, one after the other.
        operations: operations in a training; "other" is one of them.
        collectives: by kind, ranks and bytes.
        missing: what was not measured.
        hurried: what was repeated less often than it should be.
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
        """Return the cost of operations called `name`, or that of others."""
        found = {each.name: each for each in self.operations}
        return found.get(name, found[OTHER])

    def issue_s(self, operation: Operation) -> float:
        """Return the seconds in which the host issues `operation`, beside running it."""
        match operation:
            case Compute() | Copy() | Fill():
                return self.host.stream_s
            case Communication() | Together():
                return self.host.collective_s
            case _:
                return self.host.book_s

    def kernel_s(self, kernel: Kernel) -> float:
        """Return the seconds of `kernel` alone.

        One of a format that was not measured takes that of another; of a kind that was not, as
        long as any kernel that moves as many bytes.
        """
        if kernel.kind is KernelKind.MATMUL:
            return self._product_s(kernel)
        size = kernel.bytes
        if kernel.kind is KernelKind.ATTENTION:
            size = kernel.executed_flops
        curve = self._curve(kernel.kind, kernel.dtype, backward=kernel.backward)
        if curve is None:
            return self.moving_s(kernel.bytes, kernel.dtype)
        return curve.at(size)

    def moving_s(self, size_bytes: int, dtype: DType = DType.FP32) -> float:
        """Return the seconds of a kernel on elements that moves `size_bytes`."""
        curve = self._curve(KernelKind.ELEMENTWISE, dtype, backward=False)
        assert curve is not None  # it was asked for when this was made
        return curve.at(size_bytes)

    def collective_s(self, collective: str, ranks: int, size_bytes: int) -> float | None:
        """Return the seconds of `collective` on a tensor of `size_bytes`; None if not measured.

        Of a group of another size it takes as much longer as a ring passes more bytes.
        """
        nearest = self._nearest_ranks(collective, ranks)
        if nearest is None:
            return None
        passed = (1 - 1 / ranks) / (1 - 1 / nearest.ranks)
        return nearest.curve.at(size_bytes) * passed

    def landing_s(self, collective: str, ranks: int, size_bytes: int) -> float:
        """Return the seconds of `collective_s` that the host has to do with its end."""
        nearest = self._nearest_ranks(collective, ranks)
        if nearest is None or nearest.landing is None:
            return 0.0
        whole_s = self.collective_s(collective, ranks, size_bytes) or 0.0
        return min(nearest.landing.at(size_bytes), whole_s)

    @property
    def takes_from_host(self) -> bool:
        """Return whether it was measured what collectives take from a host that computes."""
        return self.runs_on_host and any(each.taken_s for each in self.collectives)

    def taken_s(self, collective: str, ranks: int, size_bytes: int) -> float:
        """Return the seconds that operations lose which the host runs beside `collective`."""
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
        side = max(1, round((kernel.flops / 2) ** (1 / 3)))  # of no known shape
        return times.at(1, side, side, side)

    def _curve(self, kind: KernelKind, dtype: DType, *, backward: bool) -> TimeCurve | None:
        alike = [each for each in self.kernels if each.kind is kind]
        return _nearest(alike, dtype, backward=backward).curve if alike else None


_Times = TypeVar("_Times", ProductTimes, KernelTimes)


def _nearest(times: Sequence[_Times], dtype: DType, *, backward: bool) -> _Times:
    """Return those of the same direction and format, as far as there are some."""
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
