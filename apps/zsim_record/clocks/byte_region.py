"""The bytes of a storage that a tensor view covers, exact up to a limit of separate runs."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

RUNS_MAX = 4096
"""Views with more separate byte runs count as one run from the first to the last byte."""


@dataclass(frozen=True, slots=True)
class ByteRegion:
    """Bytes `start` to `end`; with gaps, as sorted, non-adjacent `runs`."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...] = ()

    def overlaps(self, other: "ByteRegion") -> bool:
        """Return True if both regions share a byte."""
        if self.start >= other.end or other.start >= self.end:
            return False
        if not self.runs and not other.runs:
            return True
        few, many = sorted((self._runs(), other._runs()), key=len)
        starts = [start for start, _ in many]
        for start, end in few:
            place = bisect_right(starts, start)
            if place and many[place - 1][1] > start:
                return True
            if place < len(many) and many[place][0] < end:
                return True
        return False

    def contains(self, other: "ByteRegion") -> bool:
        """Return True if every byte of `other` is certainly in this region."""
        if self.runs:
            return self == other
        return self.start <= other.start and other.end <= self.end

    def _runs(self) -> tuple[tuple[int, int], ...]:
        return self.runs or ((self.start, self.end),)


@lru_cache(maxsize=4096)
def region_of_view(
    offset: int, sizes: Sequence[int], strides: Sequence[int], item: int
) -> ByteRegion | None:
    """Return the bytes of a view: offset and strides in elements of `item` bytes; None if empty."""
    if 0 in sizes:
        return None
    dims = sorted(
        (abs(stride), size)
        for size, stride in zip(sizes, strides, strict=True)
        if size > 1 and stride != 0
    )
    low = offset + sum(
        (size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if stride < 0
    )
    dense = 1
    while dims and dims[0][0] <= dense:  # adjacent or overlapping
        stride, size = dims.pop(0)
        dense = (size - 1) * stride + dense
    extent = dense + sum((size - 1) * stride for stride, size in dims)
    start, end = low * item, (low + extent) * item
    count = 1
    for _, size in dims:
        count *= size
    if count == 1 or count > RUNS_MAX:
        return ByteRegion(start, end)
    firsts = [low]
    for stride, size in dims:
        firsts = [first + index * stride for first in firsts for index in range(size)]
    return _merged(sorted(firsts), dense, item)


def _merged(firsts: list[int], dense: int, item: int) -> ByteRegion:
    runs: list[tuple[int, int]] = []
    for first in firsts:
        start, end = first * item, (first + dense) * item
        if runs and start <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        else:
            runs.append((start, end))
    return ByteRegion(runs[0][0], runs[-1][1], tuple(runs) if len(runs) > 1 else ())
