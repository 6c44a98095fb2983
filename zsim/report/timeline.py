"""A step as a picture: a lane for every stream, a bar for every operation.

It shows the last step of a run on the first rank of the trace, from the end of the step before to
its own: what is left of the step before is there too. A bar of a collective names the units whose
parameters or gradients it carries, or its size where they are not told apart.
"""

from dataclasses import dataclass

from zsim.analysis.summary import last_step
from zsim.model.model import Model
from zsim.report.lane import Bar, Sort, lanes
from zsim.report.svg.canvas import FAINT, LETTER, Box, Canvas
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim.units import format_seconds

WIDTH, LEFT, RIGHT = 1320.0, 128.0, 1300.0
"""The sheet; bars are between LEFT and RIGHT."""
TOP, LANE, TALL = 92.0, 46.0, 34.0
"""The first lane, from one lane to the next, and the height of a bar."""
TICKS_MAX = 14
"""Ticks of the time axis, at most."""


class TimelineError(ValueError):
    """A trace that cannot be drawn."""


def timeline(schedule: Schedule, model: Model, trace: Trace) -> str:
    """Return the SVG of the last step of `trace`, a run of `schedule`, which trains `model`.

    Raises:
        TimelineError: the trace has no times.
    """
    begin_ps, end_ps = last_step(trace)
    if begin_ps == end_ps:
        raise TimelineError(f"backend {trace.backend} has no clock: there is no time to draw")
    rank = trace.ranks[0]
    found = lanes(schedule, model, trace, rank)
    shown = found.bars
    picture = _Picture(Canvas(WIDTH, TOP + LANE * len(shown) + 52), begin_ps, end_ps)
    took = format_seconds((end_ps - begin_ps) / 1e12)
    like = f" and {rank.stands_for - 1:,} like it" if rank.stands_for > 1 else ""
    picture.draw(f"{schedule.name}: one step of {took} on rank {rank.rank}{like}", shown)
    picture.sheet.words(RIGHT, picture.sheet.height - 12, found.key, size=12.5, anchor="end")
    return picture.sheet.svg()


@dataclass(slots=True)
class _Picture:
    """A sheet, and the time from its left to its right."""

    sheet: Canvas
    begin_ps: int
    end_ps: int

    def _at(self, time_ps: int) -> float:
        return LEFT + (RIGHT - LEFT) * (time_ps - self.begin_ps) / (self.end_ps - self.begin_ps)

    def draw(self, title: str, lanes: dict[str, list[Bar]]) -> None:
        """Draw title, legend, time axis and lanes."""
        self.sheet.words(16, 34, title, size=18, bold=True)
        self._legend({bar.sort for bars in lanes.values() for bar in bars})
        below = TOP + LANE * len(lanes)
        self._axis(below)
        for number, (stream, bars) in enumerate(lanes.items()):
            y = TOP + LANE * number + (LANE - TALL) / 2
            self.sheet.words(LEFT - 12, y + TALL / 2 + 4, stream, size=13, anchor="end")
            for bar in bars:
                self._bar(bar, y)

    def _legend(self, found: set[Sort]) -> None:
        x = LEFT
        for sort in Sort:
            if sort in found:
                word, colour = sort.value
                self.sheet.bar(Box(x, 56, 18, 14), colour)
                self.sheet.words(x + 24, 67.5, word, size=12.5)
                x += 24 + LETTER * 12.5 * len(word) + 22

    def _axis(self, below: float) -> None:
        long_ps = self.end_ps - self.begin_ps
        unit, unit_ps = next(
            (name, size)
            for name, size in (("s", 10**12), ("ms", 10**9), ("us", 10**6), ("ns", 10**3))
            if long_ps >= size or size == 10**3
        )
        steps = (factor * 10**power for power in range(16) for factor in (1, 2, 5))
        step_ps = next(step for step in steps if long_ps <= TICKS_MAX * step)
        for tick in range(0, long_ps + 1, step_ps):
            x = self._at(self.begin_ps + tick)
            self.sheet.line((x, TOP - 4), (x, below + 5), colour="#dde2e7", width=1)
            self.sheet.words(x, below + 20, f"{tick / unit_ps:g}", size=12, anchor="middle")
        words = f"time since the step began, {unit}"
        middle = (LEFT + RIGHT) / 2
        self.sheet.words(middle, below + 40, words, size=12.5, anchor="middle", colour=FAINT)

    def _bar(self, bar: Bar, y: float) -> None:
        x = self._at(bar.start_ps)
        width = max(self._at(bar.end_ps) - x, 0.6)
        box = Box(x, y, width, TALL)
        self.sheet.bar(box, bar.sort.value[1])
        for size in (12.0, 10.0, 8.5):
            for name in bar.names:
                if LETTER * size * len(name) + 2 <= width:
                    self.sheet.words(
                        box.middle, y + TALL / 2 + size / 3, name, size=size, anchor="middle"
                    )
                    return
