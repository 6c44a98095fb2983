"""Rows that ranks send to each other, as a square of cells: sources from above, targets across."""

from collections.abc import Sequence

from zsim.report.svg.canvas import FAINT, INK, Box, Canvas
from zsim.schedule.binding import Counts

SIDE, CELLS = 512, 64
"""Pixels of the square, and its most cells in a row; of more ranks, neighbours share a cell."""
LEFT, TOP = 90, 60
COLOUR = "#5b8bd0"


def draw(blocks: Counts, ranks: Sequence[int], gpus_per_node: int, stage: str = "") -> str:
    """Return the rows in `blocks` from each of `ranks` to each other one as SVG."""
    each = -(-len(ranks) // CELLS)
    starts = range(0, len(ranks), each)
    side, most = min(SIDE / len(starts), 48), max(int(blocks.max()) * each * each, 1)
    canvas = Canvas(LEFT + SIDE + 20, TOP + side * len(starts) + 30, on_page=True)
    text = "rows of experts from each rank (left) to each rank (above)"
    text += f", {stage}" if stage else ""
    canvas.words(LEFT, 20, text, size=12, colour=FAINT)
    every = max(1, -(-len(starts) * 12 // SIDE))
    for row, source in enumerate(starts):
        y = TOP + side * row
        if not row % every:
            canvas.words(LEFT - 45, y + side / 2 + 4, str(ranks[source]), size=11)
            canvas.words(LEFT + side * row + 2, TOP - 8, str(ranks[source]), size=11)
        for column, target in enumerate(starts):
            sent = int(blocks[source : source + each, target : target + each].sum())
            title = f"rank {ranks[source]} to rank {ranks[target]}: {sent:,} rows"
            cell = Box(LEFT + side * column, y, side, side)
            canvas.bar(cell, COLOUR, title=title, opacity=max(sent / most, 0.02))
    nodes = [ranks[start] // gpus_per_node for start in starts]
    for row in (row for row in range(1, len(nodes)) if nodes[row] != nodes[row - 1]):
        for start, end in _borders(side * row, side * len(starts)):
            canvas.line(start, end, colour=INK, width=1)
    if nodes[-1] != nodes[0]:
        canvas.words(LEFT, TOP + side * len(starts) + 20, "lines: nodes", size=11, colour=FAINT)
    return canvas.svg()


def _borders(place: float, side: float) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Return the ends of a line across the square, and of one down."""
    across = (LEFT, TOP + place), (LEFT + side, TOP + place)
    return across, ((LEFT + place, TOP), (LEFT + place, TOP + side))
