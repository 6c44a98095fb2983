"""Draw published figures against predicted ones: a square scatter plot for each figure."""

from collections.abc import Sequence
from math import log10

from zsim.report.svg.canvas import FAINT, INK, Canvas
from zsim_lab.verdict.verdict import Verdict

SIDE, GAP, LEFT, TOP = 260.0, 96.0, 90.0, 64.0
COLUMNS = 3
BAND = 0.12
"""Relative error that the dashed lines mark."""


def picture(verdicts: Sequence[Verdict]) -> str:
    """Return all figures as SVG, with the same logarithmic scale on both axes."""
    drawn = [each for each in verdicts if each.rows]
    columns = min(COLUMNS, max(1, len(drawn)))
    rows = -(-len(drawn) // columns)
    canvas = Canvas(LEFT + columns * (SIDE + GAP), TOP + rows * (SIDE + GAP))
    canvas.words(LEFT, 28, f"Predicted, and published; dashed: {BAND:.0%} off", size=16, bold=True)
    for number, found in enumerate(drawn):
        left = LEFT + number % columns * (SIDE + GAP)
        top = TOP + number // columns * (SIDE + GAP)
        _square(canvas, found, left, top)
    return canvas.svg()


def _square(canvas: Canvas, found: Verdict, left: float, top: float) -> None:
    every = [log10(value) for each in found.rows for value in (each.predicted, each.published)]
    room = max(0.03, 0.08 * (max(every) - min(every)))
    low, high = min(every) - room, max(every) + room

    def place(value: float) -> float:
        return (log10(value) - low) / (high - low) * SIDE

    right, bottom = left + SIDE, top + SIDE
    for start, end in (((left, top), (left, bottom)), ((left, bottom), (right, bottom))):
        canvas.line(start, end, colour=INK)
    canvas.line((left, bottom), (right, top), colour=INK)
    shift = log10(1 + BAND) / (high - low) * SIDE
    canvas.line((left, bottom - shift), (right - shift, top), dashed=True, width=0.8)
    canvas.line((left + shift, bottom), (right, top + shift), dashed=True, width=0.8)
    canvas.words(left, top - 8, found.name, size=13, bold=True)
    for edge, anchor, x in ((low, "start", left), (high, "end", right)):
        text = found.shown(10**edge)
        canvas.words(x, bottom + 16, text, size=10, anchor=anchor, colour=FAINT)
    for each in found.rows:
        x, y = left + place(each.published), bottom - place(each.predicted)
        canvas.dot(x, y, colour="#1f6fb4", hollow=not each.is_kept)
        canvas.words(x + 6, y + 4, each.name, size=9)
