"""Draw predicted against published values as a log-log scatter plot with a dot per run."""

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10

from zsim.report.svg.canvas import FAINT, INK, Canvas
from zsim_lab.verdict.verdict import Verdict, VerdictRow

SIZE, LEFT, TOP, LEGEND = 560.0, 84.0, 56.0, 330.0
COLOURS = ("#1f6fb4", "#d9730d", "#2a8f4f", "#8e44ad", "#b8255f", "#6b6b00", "#3e4c59", "#0f8b8d")
"""Colours of the groups of runs; reused in order if there are more groups."""

BAND = 0.1
"""Relative error that the dashed lines mark."""


def scatter(verdicts: Sequence[Verdict]) -> str:
    """Return an SVG of all rows of `verdicts`, which must share one quantity.

    Hollow dots are runs of sweeps that may have been used to fit constants.
    """
    every = [(found.name, row) for found in verdicts for row in found.rows]
    axis = _Axis([value for _, row in every for value in (row.published, row.predicted)])
    canvas = Canvas(LEFT + SIZE + LEGEND, TOP + SIZE + 60)
    title = f"{verdicts[0].quantity}: predicted, published"
    canvas.words(LEFT, 30, title, size=16, bold=True)
    _frame(canvas, axis, verdicts[0])
    groups: dict[str, list[VerdictRow]] = {}
    for file, row in every:
        groups.setdefault(f"{file}, {row.groups['hardware']}", []).append(row)
    for number, (name, group) in enumerate(sorted(groups.items())):
        colour = COLOURS[number % len(COLOURS)]
        for each in sorted(group, key=lambda one: one.is_kept):
            canvas.dot(
                LEFT + axis.place(each.published),
                TOP + SIZE - axis.place(each.predicted),
                colour=colour,
                hollow=not each.is_kept,
            )
        y = TOP + 14 + 40 * number
        file, _, hardware = name.partition(", ")
        canvas.dot(LEFT + SIZE + 22, y - 4, colour=colour)
        canvas.words(LEFT + SIZE + 34, y, f"{hardware}: {len(group)}", size=12)
        canvas.words(LEFT + SIZE + 34, y + 15, file, size=10, colour=FAINT)
    y = TOP + SIZE - 20
    canvas.dot(LEFT + SIZE + 22, y - 4, colour=INK, hollow=True)
    canvas.words(LEFT + SIZE + 34, y, "may have been fitted; full dots judge", size=10)
    return canvas.svg()


class _Axis:
    """Logarithmic axis that maps values to pixels from 0 to SIZE."""

    def __init__(self, values: Sequence[float]) -> None:
        low, high = log10(min(values)), log10(max(values))
        room = max(0.05, 0.04 * (high - low))
        self.low, self.high = low - room, high + room

    def place(self, value: float) -> float:
        return (log10(value) - self.low) / (self.high - self.low) * SIZE

    def marks(self) -> Iterator[float]:
        """Yield 1, 2 and 5 times each power of ten, or only the powers on a long axis."""
        steps = (1, 2, 5) if self.high - self.low < 3 else (1,)
        for power in range(floor(self.low), ceil(self.high) + 1):
            for step in steps:
                if self.low <= log10(step) + power <= self.high:
                    yield step * 10.0**power


def _frame(canvas: Canvas, axis: _Axis, found: Verdict) -> None:
    bottom, right = TOP + SIZE, LEFT + SIZE
    for mark in axis.marks():
        place = axis.place(mark)
        canvas.line((LEFT + place, TOP), (LEFT + place, bottom), colour="#e4e7eb", width=0.8)
        canvas.line((LEFT, bottom - place), (right, bottom - place), colour="#e4e7eb", width=0.8)
        canvas.words(LEFT + place, bottom + 18, found.shown(mark), size=11, anchor="middle")
        canvas.words(LEFT - 8, bottom - place + 4, found.shown(mark), size=11, anchor="end")
    canvas.line((LEFT, bottom), (right, TOP), colour=INK, width=1.0)
    shift = log10(1 + BAND) / (axis.high - axis.low) * SIZE
    for start, end in (
        ((LEFT, bottom - shift), (right - shift, TOP)),
        ((LEFT + shift, bottom), (right, TOP + shift)),
    ):
        canvas.line(start, end, dashed=True, width=0.8)
    for start, end in (((LEFT, TOP), (LEFT, bottom)), ((LEFT, bottom), (right, bottom))):
        canvas.line(start, end, colour=INK, width=1.0)
    canvas.words(
        LEFT + SIZE / 2, bottom + 42, f"{found.quantity}, published", size=13, anchor="middle"
    )
    canvas.words(LEFT, TOP - 8, f"{found.quantity}, predicted; dashed: 10 % off", size=13)
