"""Draw figures as SVG: bare for a page, or with a title and a legend for a file."""

from collections.abc import Callable
from typing import assert_never

from zsim.report.svg import bar_row_drawing, choice_drawing, curve_drawing, point_drawing
from zsim.report.svg.canvas import FAINT, LETTER, Box, Canvas
from zsim.report.svg.figure import (
    BarRows,
    ChoiceChart,
    Figure,
    LaneBars,
    PointChart,
    Series,
    SeriesMark,
    StackedCurves,
)
from zsim.report.timeline import lane_picture

WIDE, NARROW = 1128.0, 372.0
"""Width of a drawing on a page in pixels, on a desktop and on a phone."""
FILE = 1000.0
NAME = 12.5
"""Font size of the legend in pixels."""
LETTERS = 140
"""Maximum number of letters in a line of text below the title."""


def drawn(figure: Figure, width: float) -> str:
    """Return the SVG of `figure` without a legend, `width` pixels wide."""
    if isinstance(figure, LaneBars):
        return lane_picture(figure, width)
    height, draw = _drawing(figure, width)
    canvas = Canvas(width, height, on_page=True)
    draw(canvas)
    return canvas.svg()


def picture(figure: Figure | None, title: str, text: str) -> str:
    """Return the SVG of `figure` for a file: a title, a text, the legend, the drawing."""
    lines = _folded(text)
    names, rows = _names(figure.series if figure is not None else ())
    top = 51.0 + 16 * len(lines)
    below = top + 22 * rows + 6
    if figure is None or isinstance(figure, LaneBars):
        height, draw = 0.0, None
    else:
        height, draw = _drawing(figure, FILE - 24)
    canvas = Canvas(FILE, below + height + 8)
    canvas.words(16, 32, title, size=min(17.0, FILE / (LETTER * max(len(title), 1))), bold=True)
    for number, line in enumerate(lines):
        canvas.words(16, 51 + 16 * number, line, size=12, colour=FAINT)
    for series, x, row in names:
        _name(canvas, series, x, top + 22 * row)
    if draw is not None:
        with canvas.group(f'transform="translate(12 {below:.0f})"'):
            draw(canvas)
    return canvas.svg()


def _drawing(
    figure: BarRows | StackedCurves | ChoiceChart | PointChart, width: float
) -> tuple[float, Callable[[Canvas], None]]:
    """Return the height of a figure in pixels, and a function that draws it."""
    match figure:
        case BarRows():
            height = bar_row_drawing.height_of(figure, width)
            return height, lambda on: bar_row_drawing.draw_bar_rows(on, figure, width)
        case StackedCurves():
            return curve_drawing.HEIGHT, lambda on: curve_drawing.draw_curves(on, figure, width)
        case ChoiceChart():
            return choice_drawing.HEIGHT, lambda on: choice_drawing.draw_choices(on, figure, width)
        case PointChart():
            return point_drawing.HEIGHT, lambda on: point_drawing.draw_points(on, figure, width)
        case _:
            assert_never(figure)


def _folded(text: str) -> list[str]:
    """Wrap `text` into lines and return the first five."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= LETTERS:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines[:5]


def _names(every: tuple[Series, ...]) -> tuple[list[tuple[Series, float, int]], int]:
    """Return the position (x, row) of each name in the legend, and the number of rows."""
    found: list[tuple[Series, float, int]] = []
    x, row = 16.0, 0
    for series in every if len(every) > 1 else ():
        width = 26 + LETTER * NAME * len(series.name) + 18
        if x + width > FILE and x > 16:
            x, row = 16.0, row + 1
        found.append((series, x, row))
        x += width
    return found, row + 1 if found else 0


def _name(canvas: Canvas, series: Series, x: float, y: float) -> None:
    if series.mark is SeriesMark.BOX:
        canvas.bar(Box(x, y, 18, 12), series.colour)
    else:
        ends = (x, y + 6), (x + 18, y + 6)
        canvas.line(*ends, colour=series.colour, width=3, dashed=series.mark is SeriesMark.DOTTED)
    canvas.words(x + 24, y + 11, series.name, size=NAME)
