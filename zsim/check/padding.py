"""Which elements of a buffer hold no parameter on any rank."""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

from zsim.layout import Layout

Held = tuple[int, int, str]
"""From the first element to before the second: the parameter of which something stands there."""


class Pads:
    """What of a buffer of a layout is padding; elements that no rank has count as that too."""

    def __init__(self, layout: Layout, ranks: int, *, shard: bool, inside: bool) -> None:
        """Take the layout, and the ranks along its axis.

        Args:
            layout: of the buffer.
            ranks: along the axis of the layout.
            shard: whether the buffer holds the segment of a rank.
            inside: whether elements are counted as in the layout, its blocks standing whole.
        """
        self._period, self._count = layout.elements, 1
        self._spans: list[Held] = []
        if inside or (not shard and layout.blocks is None):
            self._spans += [(each.start, each.end, each.parameter) for each in layout.pieces]
        elif layout.cuts is None:  # else segments are not alike, and nobody can say
            self._spans += _of_segments(layout, ranks)
            if not shard:
                self._period, self._count = layout.elements // ranks, ranks
        self._known: dict[tuple[int, int], str | None] = {}

    def parameter(self, low: int, high: int) -> str | None:
        """The first parameter that has an element in [low, high) on some rank; none in padding."""
        key = (low, high)
        if key not in self._known:
            self._known[key] = next(
                (
                    name
                    for start, end, name in self._spans
                    if start < end
                    and max(0, (start - high) // self._period + 1)
                    <= min(self._count - 1, (end - low - 1) // self._period)
                ),
                None,
            )
        return self._known[key]


def _of_segments(layout: Layout, ranks: int) -> Iterator[Held]:
    """Elements of a segment that hold a part of a parameter on some rank."""
    blocks = [
        (low, high)
        for low, high in pairwise((*(layout.blocks or (0,)), layout.elements))
        if low < high
    ]
    starts = [low for low, _ in blocks]
    for piece in layout.pieces:
        if not piece.size:
            continue
        low, high = blocks[bisect_right(starts, piece.start) - 1]
        part, base, name = (high - low) // ranks, low // ranks, piece.parameter
        first = (piece.start - low) % part
        if piece.size >= part:
            yield base, base + part, name
        elif first + piece.size <= part:
            yield base + first, base + first + piece.size, name
        else:
            yield base + first, base + part, name
            yield base, base + first + piece.size - part, name
