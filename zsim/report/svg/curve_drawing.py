"""Draw stacked curves: layers as stepped areas, with lines over them."""

from collections.abc import Callable, Sequence
from itertools import groupby

from zsim.report.svg.canvas import FAINT, GRID, LETTER, Box, Canvas
from zsim.report.svg.figure import SeriesMark, StackedCurves
from zsim.report.svg.value_axis import linear

LEFT, TOP, BELOW = 52.0, 26.0, 52.0
SIZE = 12.0
HEIGHT = 380.0

_Place = Callable[[float], float]
"""Function that maps a place or a value to a pixel position."""


def draw_curves(canvas: Canvas, found: StackedCurves, width: float) -> None:
    """Draw layers, lines, both axes, and the tooltip of each place."""
    frame = Box(LEFT, TOP, width - LEFT - 12, HEIGHT - TOP - BELOW)
    places = len(found.titles)
    sums = [sum(values) for values in zip(*found.layers, strict=True)] if found.layers else []
    every = [*sums, *(value for line in found.lines for value in line if value is not None)]
    axis = linear(0.0, max(every, default=0.0))

    def across(place: float) -> float:
        return frame.x + frame.width * place / max(places, 1)

    def up(value: float) -> float:
        return frame.bottom - frame.height * axis.share(value)

    for tick in axis.ticks:
        canvas.line((frame.x, up(tick)), (frame.x + frame.width, up(tick)), colour=GRID, width=1)
        canvas.words(frame.x - 8, up(tick) + 4, f"{tick:,.10g}", size=SIZE, anchor="end")
    canvas.words(LEFT - 8, 11, found.unit, size=SIZE, anchor="end", colour=FAINT)
    lower = [0.0] * places
    for number, values in enumerate(found.layers):
        upper = [below + value for below, value in zip(lower, values, strict=True)]
        with canvas.group(f'data-series="{number}"'):
            points = f"M{_steps(upper, across, up)}L{_steps(lower, across, up, back=True)}Z"
            canvas.path(points, fill=found.series[number].colour)
        lower = upper
    for number, line in enumerate(found.lines, start=len(found.layers)):
        with canvas.group(f'data-series="{number}"'):
            series = found.series[number]
            for part in _known(line):
                points = f"M{_steps([each for _, each in part], _from(part, across), up)}"
                canvas.path(points, stroke=series.colour, dashed=series.mark is SeriesMark.DOTTED)
    _draw_ticks(canvas, found, frame)
    for place, title in enumerate(found.titles):
        canvas.place(Box(across(place), frame.y, frame.width / places, frame.height), title)


def _steps(values: Sequence[float], across: _Place, up: _Place, *, back: bool = False) -> str:
    """Return the SVG points of a step line; equal values in a row share one segment."""
    corners: list[tuple[float, float]] = []
    for value, run in groupby(enumerate(values), lambda each: each[1]):
        at = [place for place, _ in run]
        corners += [(across(at[0]), up(value)), (across(at[-1] + 1), up(value))]
    ordered = reversed(corners) if back else corners
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in ordered)


def _from(part: list[tuple[int, float]], across: _Place) -> _Place:
    first = part[0][0]
    return lambda place: across(first + place)


def _known(line: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Return the runs of known values of a line, each value with its place."""
    found: list[list[tuple[int, float]]] = []
    for known, run in groupby(enumerate(line), lambda each: each[1] is not None):
        if known:
            found.append([(place, value) for place, value in run if value is not None])
    return found


def _draw_ticks(canvas: Canvas, found: StackedCurves, frame: Box) -> None:
    end = 0.0
    for place, name in found.ticks:
        x = frame.x + frame.width * place / max(len(found.titles), 1)
        canvas.line((x, frame.bottom), (x, frame.bottom + 5), colour=FAINT, width=1)
        if x >= end and x + len(name) * LETTER * SIZE <= frame.x + frame.width + 12:
            canvas.words(x, frame.bottom + 19, name, size=SIZE)
            end = x + len(name) * LETTER * SIZE + 10
    title, room = found.axis, frame.width + LEFT
    size = min(SIZE, room / (LETTER * max(len(title), 1)))
    canvas.words(
        frame.x + frame.width, frame.bottom + 40, title, size=size, anchor="end", colour=FAINT
    )
