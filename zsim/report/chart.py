"""A study as a picture: step time along its longest axis, a line for each choice on the others.

Choices that are names, with nothing between two of them, have bars.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, log10

from zsim.report.chart_lines import ChartValues, is_of_names, lines_of, values_of
from zsim.report.svg.canvas import FAINT, LETTER, Box, Canvas
from zsim.study.result import StudyResult
from zsim.study.row import StudyRow
from zsim.units import format_seconds

WIDTH, HEIGHT = 1000.0, 470.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 690.0, 112.0, 400.0
"""The frame of the lines; names of lines stand to the right of it."""
TICKS_MAX = 6
BARS = 0.8
"""Share of the width of a choice that its bars have."""
COLOURS = (
    *("#3f6fb5", "#d1603f", "#4e8752", "#c98a1b", "#7c5a8e", "#3b8a92"),
    *("#1f3f77", "#8c2f1b", "#2f5233", "#9a6b00", "#c77daf", "#7b8794"),
)


def chart(result: StudyResult) -> str:
    """Return the SVG of `result`; hollow dots are runs that do not meet the goal."""
    sheet = Canvas(WIDTH, HEIGHT)
    sheet.words(16, 32, result.question, size=17, bold=True)
    answer = f"{result.answer[:1].upper()}{result.answer[1:]}"
    for line, words in enumerate(_folded(answer, 140)[:3]):
        sheet.words(16, 51 + 16 * line, words, size=12, colour=FAINT)
    rows = [row for row in result.rows if row.outcome.summary is not None]
    if not rows:
        return sheet.svg()
    counts = [len({row.labels[at] for row in rows}) for at in range(len(result.axes))]
    axis = counts.index(max(counts))
    labels = list(dict.fromkeys(row.labels[axis] for row in rows))
    _Frame(sheet, labels, values_of(result, rows)).draw(result, rows, axis)
    return sheet.svg()


def _folded(text: str, width: int) -> list[str]:
    """Return `text` in lines of at most `width` letters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


class _Frame:
    """Frame of a chart: places of labels and values, logarithmic where they are far apart."""

    def __init__(self, sheet: Canvas, labels: list[str], values: ChartValues) -> None:
        self.sheet = sheet
        self.labels = labels
        self.values = values
        self.logarithmic = values.are_far_apart
        least, most = min(values.of_run.values()), max(values.of_run.values())
        if self.logarithmic:
            powers = range(floor(log10(least)), ceil(log10(most)) + 1)
            self.ticks = [10.0**power for power in powers]
        else:
            steps = (factor * 10.0**power for power in range(-12, 12) for factor in (1, 2, 5))
            step = next(step for step in steps if most <= TICKS_MAX * step)
            self.ticks = [step * tick for tick in range(ceil(most / step) + 1)]

    def across(self, label: str) -> float:
        """Return where a choice on the axis is."""
        return LEFT + (RIGHT - LEFT) * (self.labels.index(label) + 0.5) / len(self.labels)

    def up(self, value: float) -> float:
        """Return where a value is."""
        place, low, high = value, self.ticks[0], self.ticks[-1]
        if self.logarithmic:
            place, low, high = log10(place), log10(low), log10(high)
        return BOTTOM - (BOTTOM - TOP) * (place - low) / (high - low)

    def draw(self, result: StudyResult, rows: Sequence[StudyRow], axis: int) -> None:
        """Draw axes, and a line or the bars of each combination of the others."""
        self._axes(result.axes[axis])
        accepted = {row.name for row in result.ranking.accepted}
        lines = lines_of(result, rows, axis)
        names = is_of_names(result, axis)
        width = (RIGHT - LEFT) / len(self.labels) * BARS / len(lines)
        for at, (name, line) in enumerate(lines.items()):
            colour = COLOURS[at % len(COLOURS)]
            places = [
                (self.across(row.labels[axis]), self.up(self.values.of_run[row.name]))
                for row in line
            ]
            beside = (at - (len(lines) - 1) / 2) * width if names else 0.0
            for start, end in () if names else pairwise(places):
                self.sheet.line(start, end, colour=colour, width=2)
            for row, (x, y) in zip(line, places, strict=True):
                meets = row.name in accepted
                if names and not self.logarithmic:
                    bar = Box(x + beside - 0.45 * width, y, 0.9 * width, BOTTOM - y)
                    self.sheet.box(bar, "", colour if meets else "white")
                elif not meets:
                    self.sheet.box(Box(x + beside - 4, y - 4, 8, 8), "", "white")
                self.sheet.dot(x + beside, y, colour=colour, hollow=not meets)
            y = TOP + 12 + 22 * at
            if name:
                self.sheet.line((RIGHT + 18, y), (RIGHT + 42, y), colour=colour, width=3)
                self.sheet.words(RIGHT + 50, y + 4, name, size=_fitting(name, WIDTH - RIGHT - 60))

    def _axes(self, name: str) -> None:
        for value in self.ticks:
            y = self.up(value)
            self.sheet.line((LEFT, y), (RIGHT, y), colour="#dde2e7", width=1)
            shown = f"{value:g}" if self.values.like else _shown(value)
            self.sheet.words(LEFT - 8, y + 4, shown, size=12, anchor="end")
        title = "step time"
        if self.values.like:
            title = f"step time over the fastest that fits with the same {self.values.like}"
        how = ", logarithmic" if self.logarithmic else ""
        self.sheet.words(LEFT, TOP - 14, f"{title}{how}", size=12, colour=FAINT)
        apart = max(1, len(self.labels) // 16 + 1)
        pitch = (RIGHT - LEFT) / len(self.labels) * apart
        for label in self.labels[::apart]:
            self.sheet.words(
                self.across(label), BOTTOM + 20, label, size=_fitting(label, pitch), anchor="middle"
            )
        self.sheet.words(
            (LEFT + RIGHT) / 2, BOTTOM + 46, name, size=13, anchor="middle", colour=FAINT
        )


def _shown(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 or not seconds else format_seconds(seconds)


def _fitting(text: str, width: float) -> float:
    """Return size of letters with which `text` is at most so wide."""
    return min(12.5, width / (LETTER * max(len(text), 1)))
