"""Draw rows of horizontal bars."""

from zsim.report.svg.canvas import FAINT, GRID, LETTER, Box, Canvas
from zsim.report.svg.figure import BarRows, RowBar
from zsim.report.svg.value_axis import ValueAxis, linear

ROW, TALL, LABEL = 34.0, 24.0, 18.0
"""Height of a row, of a bar, and of a label above a bar."""
BELOW = 48.0
"""Height of the axis below the rows."""
SIZE = 12.0
WIDE_LETTER = 0.75
"""Width of a letter in signed numbers, as a share of the font size."""
NARROW = 600.0
"""Drawings narrower than this put row names and labels above the bars."""
PALE = 0.4
"""Opacity of the bars of runs that do not meet the goal."""


def height_of(found: BarRows, width: float) -> float:
    """Return the height of the drawing in pixels."""
    return len(found.rows) * _pitch(width) + BELOW


def _pitch(width: float) -> float:
    return ROW + (LABEL if width < NARROW else 0.0)


def draw_bar_rows(canvas: Canvas, found: BarRows, width: float) -> None:
    """Draw the rows, their names, and the axis below them."""
    label = max((len(name) for name, _ in found.rows), default=0) * LETTER * SIZE + 14
    left = 8.0 if width < NARROW else min(label, 0.4 * width)
    axis = _axis(found, width)
    before, after = _room(found, width)
    x = left + before
    frame = Box(x, 4.0, width - x - after, len(found.rows) * _pitch(width))
    _draw_axis(canvas, axis, frame, found.axis)
    for at, (name, bars) in enumerate(found.rows):
        y = frame.y + at * _pitch(width)
        if width < NARROW:
            above = ": ".join([name, *(bar.text for bar in bars if found.is_beside)])
            canvas.words(left, y + 12, above, size=min(SIZE, width / (LETTER * max(len(above), 1))))
        else:
            fits = min(SIZE, (left - 14) / (LETTER * max(len(name), 1)))
            canvas.words(left - 8, y + ROW / 2 + 4, name, size=fits, anchor="end")
    for number, series in enumerate(found.series):
        with canvas.group(f'data-series="{number}"'):
            for at, (_, bars) in enumerate(found.rows):
                y = frame.y + (at + 1) * _pitch(width) - (ROW + TALL) / 2
                for bar in bars:
                    if bar.series == number:
                        box = _box(bar, axis, frame, y)
                        opacity = PALE if bar.pale else 1
                        canvas.bar(box, series.colour, title=bar.title, opacity=opacity)
                        if not found.is_beside or width >= NARROW:
                            _draw_text(canvas, bar, box, is_beside=found.is_beside)


def _axis(found: BarRows, width: float) -> ValueAxis:
    ends = [end for _, bars in found.rows for bar in bars for end in (bar.start, bar.end)]
    ticks = 4 if width < NARROW else 10
    return linear(min(ends, default=0), max(ends, default=0), ticks=ticks, tight=True)


def _room(found: BarRows, width: float) -> tuple[float, float]:
    """Return the width of the labels left of the lowest and right of the highest end of a bar."""
    if not found.is_beside or width < NARROW:
        return 0.0, 12.0
    every = [bar for _, bars in found.rows for bar in bars]
    before = max((len(bar.text) for bar in every if bar.end < bar.start), default=0)
    after = max((len(bar.text) for bar in every if bar.end >= bar.start), default=0)
    return before * WIDE_LETTER * SIZE + 8, after * WIDE_LETTER * SIZE + 8


def _draw_axis(canvas: Canvas, axis: ValueAxis, frame: Box, title: str) -> None:
    for tick in axis.ticks:
        x = frame.x + frame.width * axis.share(tick)
        canvas.line((x, frame.y), (x, frame.bottom + 4), colour=GRID, width=1.6 if not tick else 1)
        canvas.words(x, frame.bottom + 19, f"{tick:,.10g}", size=SIZE, anchor="middle")
    canvas.words(frame.middle, frame.bottom + 38, title, size=SIZE, anchor="middle", colour=FAINT)


def _box(bar: RowBar, axis: ValueAxis, frame: Box, y: float) -> Box:
    ends = [frame.x + frame.width * axis.share(each) for each in (bar.start, bar.end)]
    return Box(min(ends), y, max(abs(ends[1] - ends[0]), 0.6), TALL)


def _draw_text(canvas: Canvas, bar: RowBar, box: Box, *, is_beside: bool) -> None:
    y = box.y + TALL / 2 + 4
    if is_beside and bar.end >= bar.start:
        canvas.words(box.x + box.width + 6, y, bar.text, size=SIZE)
    elif is_beside:
        canvas.words(box.x - 6, y, bar.text, size=SIZE, anchor="end")
    elif len(bar.text) * LETTER * SIZE + 4 <= box.width:
        canvas.inside(box.middle, y, bar.text, size=SIZE)
