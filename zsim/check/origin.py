"""Where a value comes from: what wrote it, what that was made of, and so on, line by line."""

from collections.abc import Callable
from itertools import pairwise

from zsim.check.placed import Piece, Placement, Source

LINES_MAX = 24
"""Lines of one witness."""


def told(source: Source, says: Callable[[Placement], str]) -> tuple[str, ...]:
    """Who wrote what was read, and who wrote what they read, the nearest first.

    Where what was read is not all the same, or has holes, what stands around that comes before.
    """
    lines: dict[str, None] = {}
    waiting = [source]
    for buffer, pieces, start, end in waiting:
        for _, _, placement, (operation, sources), _ in _telling(pieces, start, end):
            line = f"{operation} wrote {buffer}: {says(placement)}"
            if line not in lines:
                lines[line] = None
                waiting += sources
        if len(lines) >= LINES_MAX:
            break
    return tuple(lines)[:LINES_MAX]


def _telling(pieces: tuple[Piece, ...], start: int, end: int) -> list[Piece]:
    """The pieces that were read; around holes, those beside them too. Oddities come first."""
    read = [each for each in pieces if each[0] < end and start < each[1]]
    odd: list[Piece] = []
    for one, other in pairwise(read):
        if one[1] != other[0] or one[2] != other[2]:
            odd += [one, other]
    if not read or read[0][0] > start or read[-1][1] < end:
        odd += [each for each in pieces if each[0] == end or each[1] == start]
    return [*odd, *(each for each in read if each not in odd)]
