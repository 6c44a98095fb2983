"""Cover a range of a tensor's elements, in row-major order, with boxes."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class TensorBox(NamedTuple):
    """A box whose elements are contiguous in the tensor; `start` is its offset in the range."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        """Return the number of elements in the box."""
        return prod(self.sizes)


def boxes(shape: tuple[int, ...], first: int, size: int) -> Iterator[TensorBox]:
    """Yield the boxes that cover elements `first` to `first` + `size`.

    They are the end of a row, whole rows and the start of a row, recursively: at most 2n - 1 boxes
    in n dimensions.
    """
    if size <= 0:
        return
    if not shape:
        yield TensorBox((), (), 0)
        return
    row = prod(shape[1:])
    end = first + size
    low, high = -(-first // row), end // row  # whole rows
    if low > high:
        yield from _in_row(shape, high, first - high * row, size, start=0)
        return
    head = low * row - first
    if head:
        yield from _in_row(shape, low - 1, row - head, head, start=0)
    if high > low:
        yield TensorBox((low, *[0] * len(shape[1:])), (high - low, *shape[1:]), head)
    tail = end - high * row
    if tail:
        yield from _in_row(shape, high, 0, tail, start=size - tail)


def _in_row(
    shape: tuple[int, ...], row: int, first: int, size: int, *, start: int
) -> Iterator[TensorBox]:
    for box in boxes(shape[1:], first, size):
        yield TensorBox((row, *box.offsets), (1, *box.sizes), start + box.start)
