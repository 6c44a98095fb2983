"""Boxes of an n-dimensional tensor that make up a range of its elements in row-major order."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple


class TensorBox(NamedTuple):
    """A box of a tensor, whose elements lie in a row; `start` elements of the range before it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        """Number of elements in the box."""
        return prod(self.sizes)


def boxes(shape: tuple[int, ...], first: int, size: int) -> Iterator[TensorBox]:
    """Yield the boxes of elements `first` to `first` + `size`: the end of a row, rows, a begin.

    There are at most 2n - 1 of them in n dimensions.
    """
    if size <= 0:
        return
    if not shape:
        yield TensorBox((), (), 0)
        return
    row = prod(shape[1:])
    end = first + size
    low, high = -(-first // row), end // row  # rows that are whole
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
