"""Draw values over choices as lines, dots or bars."""

from itertools import pairwise

from zsim.report.svg.canvas import FAINT, GRID, LETTER, Box, Canvas
from zsim.report.svg.figure import ChoiceChart, ChoicePoint
from zsim.report.svg.value_axis import ValueAxis, linear, logarithmic
from zsim.units import format_seconds

LEFT, TOP, BELOW = 76.0, 30.0, 56.0
HEIGHT = 370.0
SIZE, SMALL = 12.5, 9.0
"""Normal and smallest font size of labels; if labels do not fit at SMALL, some are skipped."""
BARS = 0.8
"""Share of a choice's width that its bars fill."""
APART = 0.35
"""Distance between the dots of a choice, as a share of a bar's width; separates equal values."""
PALE = 0.35
"""Opacity of the bar of a run that does not meet the goal."""


def draw_choices(canvas: Canvas, found: ChoiceChart, width: float) -> None:
    """Draw both axes, and the points of each line."""
    frame = Box(LEFT, TOP, width - LEFT - 12, HEIGHT - TOP - BELOW)
    _Choices(canvas, found, frame, axis_of(found)).draw()


def axis_of(found: ChoiceChart) -> ValueAxis:
    """Return the axis of values: logarithmic, or linear from 0."""
    values = [point.value for line in found.points for point in line]
    if found.is_logarithmic:
        return logarithmic(min(values), max(values))
    tops = [point.value + point.band for line in found.points for point in line]
    return linear(0.0, max(tops, default=0.0))


class _Choices:
    """Draws a chart in a frame; maps choices and values to pixels."""

    def __init__(self, canvas: Canvas, found: ChoiceChart, frame: Box, axis: ValueAxis) -> None:
        self.canvas = canvas
        self.found = found
        self.frame = frame
        self.axis = axis
        self.pitch = frame.width / len(found.choices)

    def across(self, choice: int) -> float:
        """Return the horizontal position of the middle of a choice."""
        return self.frame.x + self.pitch * (choice + 0.5)

    def up(self, value: float) -> float:
        """Return the vertical position of a value, clamped to the start of the axis."""
        share = self.axis.share(max(value, self.axis.low))
        return self.frame.bottom - self.frame.height * share

    def draw(self) -> None:
        """Draw axes and lines."""
        self._draw_values()
        self._draw_labels()
        width = self.pitch * BARS / max(len(self.found.points), 1)
        for number, points in enumerate(self.found.points):
            beside = (number - (len(self.found.points) - 1) / 2) * width
            with self.canvas.group(f'data-series="{number}"'):
                self._draw_line(number, points, width, beside)

    def _draw_line(
        self, number: int, points: tuple[ChoicePoint, ...], width: float, beside: float
    ) -> None:
        found, canvas = self.found, self.canvas
        colour = found.series[number].colour
        shift = beside if found.is_bars else APART * beside
        places = [(self.across(each.choice) + shift, self.up(each.value)) for each in points]
        for start, end in pairwise(places) if found.is_joined else ():
            canvas.line(start, end, colour=colour, width=2)
        for each, (x, y) in zip(points, places, strict=True):
            if found.is_bars:
                bar = Box(x - 0.45 * width, y, 0.9 * width, self.frame.bottom - y)
                canvas.bar(bar, colour, title=each.title, opacity=1 if each.meets else PALE)
            if each.band:
                ends = (x, self.up(each.value - each.band)), (x, self.up(each.value + each.band))
                canvas.line(*ends, colour=FAINT if found.is_bars else colour, width=1.2)
            if not found.is_bars:
                canvas.dot(x, y, colour=colour, hollow=not each.meets, title=each.title)

    def _draw_values(self) -> None:
        frame = self.frame
        for value in self.axis.ticks:
            y = self.up(value)
            self.canvas.line((frame.x, y), (frame.x + frame.width, y), colour=GRID, width=1)
            shown = _seconds(value) if self.found.is_seconds else f"{value:,.10g}"
            self.canvas.words(frame.x - 8, y + 4, shown, size=12, anchor="end")
        how = ", logarithmic" if self.found.is_logarithmic else ""
        title = f"{self.found.values}{how}"
        size = min(12.0, (frame.x + frame.width - 8) / (LETTER * len(title)))
        self.canvas.words(8, TOP - 16, title, size=size, colour=FAINT)

    def _draw_labels(self) -> None:
        choices, longest = self.found.choices, max(map(len, self.found.choices))
        size = min(SIZE, self.pitch / (LETTER * max(longest, 1)))
        apart = 1
        if size < SMALL:
            size = SMALL
            apart = int(-(-SMALL * LETTER * (longest + 1) // self.pitch))
        for at in range(0, len(choices), apart):
            x = self.across(at)
            self.canvas.words(x, self.frame.bottom + 20, choices[at], size=size, anchor="middle")
        middle, y = self.frame.middle, self.frame.bottom + 44
        self.canvas.words(middle, y, self.found.axis, size=13, anchor="middle", colour=FAINT)


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 1000 or not value else format_seconds(value)
