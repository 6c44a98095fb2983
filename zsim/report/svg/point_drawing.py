"""Draw points in a plane, with their Pareto front as a step line."""

from itertools import pairwise

from zsim.report.svg.canvas import FAINT, GRID, LETTER, Box, Canvas
from zsim.report.svg.figure import PointChart
from zsim.report.svg.value_axis import linear

LEFT, TOP, BELOW = 64.0, 30.0, 52.0
HEIGHT = 380.0
SIZE = 12.0
ROOM = 0.06
"""Margin around the values, as a share of their span."""


def draw_points(canvas: Canvas, found: PointChart, width: float) -> None:
    """Draw both axes, every point, and the line of the front."""
    frame = Box(LEFT, TOP, width - LEFT - 16, HEIGHT - TOP - BELOW)
    few = 4 if width < 600 else 8
    across = linear(*_around([each.x for each in found.points]), ticks=few, tight=True)
    up = linear(*_around([each.y for each in found.points]), tight=True)

    def place(x: float, y: float) -> tuple[float, float]:
        return frame.x + frame.width * across.share(x), frame.bottom - frame.height * up.share(y)

    for tick in across.ticks:
        x, _ = place(tick, up.low)
        canvas.line((x, frame.y), (x, frame.bottom + 4), colour=GRID, width=1)
        canvas.words(x, frame.bottom + 19, f"{tick:,.10g}", size=SIZE, anchor="middle")
    for tick in up.ticks:
        _, y = place(across.low, tick)
        canvas.line((frame.x, y), (frame.x + frame.width, y), colour=GRID, width=1)
        canvas.words(frame.x - 8, y + 4, f"{tick:,.10g}", size=SIZE, anchor="end")
    canvas.words(8, TOP - 14, found.y_axis, size=SIZE, colour=FAINT)
    size = min(SIZE, width / (LETTER * max(len(found.x_axis), 1)))
    canvas.words(
        frame.middle, frame.bottom + 40, found.x_axis, size=size, anchor="middle", colour=FAINT
    )
    for number in reversed(range(len(found.series))):  # the front lies on top
        points = [each for each in found.points if each.series == number]
        colour = found.series[number].colour
        with canvas.group(f'data-series="{number}"'):
            if not number:
                for one, other in pairwise(sorted(points, key=lambda each: each.x)):
                    corner = place(other.x, one.y)  # no point is lower until the next one
                    canvas.line(place(one.x, one.y), corner, colour=colour, width=1.5)
                    canvas.line(corner, place(other.x, other.y), colour=colour, width=1.5)
            for each in points:
                x, y = place(each.x, each.y)
                canvas.dot(x, y, colour=colour, title=each.title)
                if each.text:
                    # no point lies below the line of the front, so the text is free to read
                    canvas.words(x + 7, y + 15, each.text, size=11)


def _around(values: list[float]) -> tuple[float, float]:
    """Return the range of the values with a margin on both sides, but not below 0."""
    least, most = min(values, default=0.0), max(values, default=1.0)
    room = ROOM * ((most - least) or abs(most) or 1.0)
    return max(least - room, 0.0), most + room
