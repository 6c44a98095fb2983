"""Where a value comes from: what wrote it, what that was made of, and so on, line by line."""

from collections.abc import Callable

from zsim.check.placed import Placement, Source

LINES_MAX = 24
"""Lines of one witness; what is nearest comes first."""


def told(source: Source, says: Callable[[Placement], str]) -> tuple[str, ...]:
    """Who wrote what was read, and who wrote what they read, the nearest first."""
    lines: dict[str, None] = {}
    waiting = [source]
    for buffer, pieces, start, end in waiting:
        for low, high, placement, (operation, sources), _ in pieces:
            if high <= start or end <= low:
                continue
            line = f"{operation} wrote {buffer}: {says(placement)}"
            if line not in lines:
                lines[line] = None
                waiting += sources
        if len(lines) >= LINES_MAX:
            break
    return tuple(lines)[:LINES_MAX]
