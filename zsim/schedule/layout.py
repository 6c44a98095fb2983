"""Layouts of flat tensors: the part of each rank, the parameters in it, and the padding."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from math import gcd
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct


class LayoutError(ValueError):
    """A layout that cannot exist."""


class Piece(Struct, frozen=True, kw_only=True, gc=False):
    """`size` elements from `start` on hold parameter `parameter`, flattened in row-major order.

    `copies` names axes along which every rank holds the same values (a layer norm under tensor
    parallelism): a norm counts them once.
    """

    parameter: str
    start: int
    size: int
    copies: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """First element past the piece."""
        return self.start + self.size


class Fragment(NamedTuple):
    """`size` elements of a parameter from its element `offset` on, at `position` of a buffer."""

    parameter: str
    offset: int
    position: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A flat tensor of `elements`, padding included, split along `axis`.

    Elements that no piece covers are padding and always zero. Without `cuts` the tensor has equal
    segments, one for each coordinate of `axis`; with it segment i is [cuts[i], cuts[i + 1]), which
    may be empty. Without `axis` every rank has the whole tensor.

    `blocks` holds the starts of blocks, each of which is split on its own: of N ranks, rank i owns
    the i-th N-th of every block. A buffer holds the ranks' segments in order, each with its part
    of every block. Parameters with separate padding are gathered as one tensor like this. The
    starts of pieces, blocks and windows refer to the tensor with whole blocks in order.

    Ranks' parts, also of each block, start at multiples of `alignment` elements.
    """

    name: str
    pieces: tuple[Piece, ...]
    elements: int
    axis: str | None = None
    cuts: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    alignment: int = 1
    divisor: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # A number divides every block if and only if it divides all their starts and ends.
        object.__setattr__(self, "divisor", gcd(*(self.blocks or ()), self.elements))
        if self.elements < 0:
            raise LayoutError(f"layout {self.name}: elements {self.elements} must be >= 0")
        if self.alignment < 1:
            raise LayoutError(f"layout {self.name}: alignment {self.alignment} must be >= 1")
        for piece in self.pieces:
            if piece.start < 0 or piece.size < 0:
                raise LayoutError(
                    f"layout {self.name}: {piece.parameter} has a negative start or size"
                )
        if self.blocks is not None:
            self._inspect_blocks(self.blocks)
        if self.cuts is None:
            return
        if self.axis is None:
            raise LayoutError(f"layout {self.name}: cuts need an axis")
        if any(low > high for low, high in pairwise(self.cuts)) or len(self.cuts) < 2:
            raise LayoutError(f"layout {self.name}: cuts {self.cuts} must ascend")

    def _inspect_blocks(self, blocks: tuple[int, ...]) -> None:
        if self.axis is None or self.cuts is not None:
            raise LayoutError(f"layout {self.name}: blocks need an axis, and no cuts")
        ends = (*blocks, self.elements)
        if not blocks or blocks[0] != 0 or any(low > high for low, high in pairwise(ends)):
            raise LayoutError(
                f"layout {self.name}: blocks {blocks} must ascend from 0 to {self.elements}"
            )

    def segment(self, coordinate: int, count: int) -> tuple[int, int]:
        """Return start and size of the segment of the rank at `coordinate` of `count`.

        Both refer to a buffer with the whole tensor, which holds the segments in order, also with
        blocks.

        Raises:
            LayoutError: `count` does not fit the cuts, or does not divide the elements or a block.
        """
        if self.axis is None:
            return 0, self.elements
        if self.cuts is not None:
            if len(self.cuts) != count + 1:
                raise LayoutError(
                    f"layout {self.name}: {len(self.cuts)} cuts for {count} ranks, "
                    f"{count + 1} needed"
                )
            return self.cuts[coordinate], self.cuts[coordinate + 1] - self.cuts[coordinate]
        if self.divisor % count:
            size = next(high - low for low, high in self._blocks() if (high - low) % count)
            raise LayoutError(f"layout {self.name}: {size} elements in {count} equal segments")
        size = self.elements // count
        return coordinate * size, size

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Return start and end of each block; of the whole tensor if there are no blocks."""
        return pairwise((*(self.blocks or (0,)), self.elements))

    def fragments(self, count: int, coordinate: int | None = None) -> Iterator[Fragment]:
        """Yield the fragments of parameters that a buffer holds, in order of blocks.

        Args:
            count: ranks along the axis.
            coordinate: of the rank whose segment the buffer holds; None for the whole tensor.
        """
        pieces = sorted(self.pieces, key=attrgetter("start"))
        ends = list(accumulate((piece.end for piece in pieces), max))
        for low, high, position in self._stretches(count, coordinate):
            for piece in islice(pieces, bisect_right(ends, low), None):
                if piece.start >= high:
                    break
                first, end = max(low, piece.start), min(high, piece.end)
                if first < end:
                    place = position + first - low
                    yield Fragment(piece.parameter, first - piece.start, place, end - first)

    def _stretches(self, count: int, coordinate: int | None) -> Iterator[tuple[int, int, int]]:
        """Yield (start, end, position in the buffer) of each range of the tensor in a buffer."""
        if self.axis is None or (self.blocks is None and coordinate is None):
            yield 0, self.elements, 0
        elif self.blocks is None:
            assert coordinate is not None
            start, size = self.segment(coordinate, count)
            yield start, start + size, 0
        else:
            segment = self.segment(0, count)[1]
            for start, end in self._blocks():
                part = (end - start) // count
                for index in range(count) if coordinate is None else (coordinate,):
                    low = start + index * part
                    row = index * segment if coordinate is None else 0
                    yield low, low + part, row + start // count

    def window(
        self, start: int, size: int, coordinate: int, count: int, *, ranks: int = 1
    ) -> tuple[int, int]:
        """Return start and size of the overlap of a rank's segment with a window, (0, 0) if none.

        The start is relative to the segment's first element. The overlap is contiguous in the
        segment, with blocks too: the end of one block, all blocks in between, and the start of
        another.

        Args:
            start: of the window in the whole tensor, counted like the starts of pieces.
            size: of the window.
            coordinate: of the rank along the axis.
            count: ranks along the axis.
            ranks: number of neighbours from `coordinate` on that count as one; not with blocks.
        """
        first = self._before(start, coordinate, count, ranks)
        end = self._before(start + size, coordinate, count, ranks)
        return (first, end - first) if first < end else (0, 0)

    def parts(self, start: int, size: int, count: int) -> list[int]:
        """Return the elements of a window on each rank that owns some of it; not with blocks."""
        if self.axis is None or not size:
            return [size] * bool(size)
        ends = self.cuts or range(0, self.elements + 1, self.segment(0, count)[1] or 1)
        first, last = bisect_right(ends, start) - 1, bisect_left(ends, start + size)
        owned = (self.window(start, size, rank, count)[1] for rank in range(first, last))
        return [part for part in owned if part]

    def _before(self, place: int, coordinate: int, count: int, ranks: int) -> int:
        """Return the number of a segment's elements before element `place` of the whole tensor."""
        if self.blocks is None:
            low = self.segment(coordinate, count)[0]
            last = self.segment(coordinate + ranks - 1, count)
            return min(max(place - low, 0), sum(last) - low)
        block = bisect_right(self.blocks, place)
        start = self.blocks[block - 1]
        end = self.blocks[block] if block < len(self.blocks) else self.elements
        part = (end - start) // count
        return start // count + min(max(place - start - coordinate * part, 0), part)
