"""Timeline of a step as a picture: a lane for every stream, a bar for every operation.

It shows the last step of a run on the first rank of the trace. The step starts at the end of the
step before it, so late operations of that step appear too. `zsim.report.svg.lane` labels the bars.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby

from zsim.analysis.summary import last_step
from zsim.model.model import Model
from zsim.report.svg.canvas import FAINT, LETTER, Box, Canvas, data
from zsim.report.svg.figure import LaneBars, NoFigureError
from zsim.report.svg.lane import Bar, Sort, lanes
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim.units import format_seconds

WIDTH, LEFT, RIGHT = 1320.0, 128.0, 1300.0
"""Width of the picture in pixels; bars lie between LEFT and RIGHT."""
TOP, LANE, TALL = 92.0, 46.0, 34.0
"""Position of the first lane, distance between lanes, and height of a bar."""
PANEL = 62.0
"""Height of a close-up's title and axis."""
MANY = 30
"""Maximum number of units whose names fit into bars; above it, a few are drawn close up."""
CLOSE = 3
"""Number of units in a close-up."""
TICKS_MAX = 14
"""Maximum number of ticks of the time axis."""


class TimelineError(NoFigureError):
    """A trace without times, which cannot be drawn."""


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
    panels = close_ups(shown)
    tall = TOP + LANE * len(shown) + 52
    below = len(panels) * (PANEL + LANE * len(shown) + 30)
    picture = _Picture(Canvas(WIDTH, tall + below), begin_ps, end_ps)
    took = format_seconds((end_ps - begin_ps) / 1e12)
    like = f" and {rank.stands_for - 1:,} like it" if rank.stands_for > 1 else ""
    picture.draw(f"{schedule.name}: one step of {took} on rank {rank.rank}{like}", shown)
    _draw_panels(picture.sheet, panels, tall)
    picture.sheet.words(RIGHT, picture.sheet.height - 12, found.key, size=12.5, anchor="end")
    return picture.sheet.svg()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseUp:
    """An enlarged part of a step: its title, start and end in picoseconds, and bars by stream."""

    title: str
    begin_ps: int
    end_ps: int
    bars: dict[str, list[Bar]]


def close_ups(bars: dict[str, list[Bar]]) -> tuple[CloseUp, ...]:
    """Return close-ups of the middle of forward and backward if there are too many units."""
    of_phases = (
        ("forward", {Sort.FORWARD}),
        ("backward", {Sort.BACKWARD, Sort.RECOMPUTE}),
    )
    found = [_close_up(bars, word, sorts) for word, sorts in of_phases]
    return tuple(each for each in found if each is not None)


def _close_up(bars: dict[str, list[Bar]], word: str, sorts: set[Sort]) -> CloseUp | None:
    """Return a close-up of a few units in the middle of a phase; None if the names fit anyway."""
    lane = max(bars.values(), key=lambda each: sum(bar.sort in sorts for bar in each))
    named = [bar for bar in lane if bar.sort in sorts and bar.names]
    runs: dict[str, list[Bar]] = {}  # the first micro-batch: stop when a unit repeats
    for name, run in groupby(named, lambda bar: bar.names[0]):
        if name in runs:
            break
        runs[name] = list(run)
    if len(runs) <= MANY:
        return None
    first = (len(runs) - CLOSE) // 2
    shown = list(runs)[first : first + CLOSE]
    begin_ps = runs[shown[0]][0].start_ps
    end_ps = max(runs[shown[-1]][-1].end_ps, begin_ps + 1)
    inside = {
        stream: [
            replace(bar, start_ps=max(bar.start_ps, begin_ps), end_ps=min(bar.end_ps, end_ps))
            for bar in each
            if bar.end_ps > begin_ps and bar.start_ps < end_ps
        ]
        for stream, each in bars.items()
    }
    title = f"Close up: {word} of {shown[0]} to {shown[-1]}"
    return CloseUp(title=title, begin_ps=begin_ps, end_ps=end_ps, bars=inside)


def close_up_picture(panels: tuple[CloseUp, ...]) -> str:
    """Return an SVG of only the close-ups, stacked vertically."""
    lanes = len(panels[0].bars)
    sheet = Canvas(WIDTH, len(panels) * (PANEL + LANE * lanes + 30), on_page=True)
    _draw_panels(sheet, panels, 0.0)
    return sheet.svg()


def lane_picture(found: LaneBars, width: float) -> str:
    """Return an SVG of only the lanes, with the data that a script needs to zoom and label them."""
    height = LANE * len(found.lanes) + 60
    sheet = Canvas(width, height, attributes=_for_script(found))
    picture = _Picture(sheet, found.begin_ps, found.end_ps, 8.0, Edges(LEFT - 20, width - 12))
    picture.zoomable(found)
    return sheet.svg()


def _for_script(found: LaneBars) -> str:
    unit, unit_ps = unit_of(found.end_ps - found.begin_ps)
    long = (found.end_ps - found.begin_ps) / unit_ps
    return f' data-long="{long}" data-unit="{unit}" data-left="{LEFT - 20:.0f}"'


def _draw_panels(sheet: Canvas, panels: tuple[CloseUp, ...], top: float) -> None:
    for at, each in enumerate(panels):
        y = top + at * (PANEL + LANE * len(each.bars) + 30)
        _Picture(sheet, each.begin_ps, each.end_ps, y + PANEL - 30).panel(each)


@dataclass(frozen=True, slots=True)
class Edges:
    """Left and right edge of the area for bars, in pixels."""

    left: float
    right: float


@dataclass(slots=True)
class _Picture:
    """A canvas and the interval of time that its width shows."""

    sheet: Canvas
    begin_ps: int
    end_ps: int
    top: float = TOP
    edges: Edges = Edges(LEFT, RIGHT)

    def _at(self, time_ps: int) -> float:
        share = (time_ps - self.begin_ps) / (self.end_ps - self.begin_ps)
        return self.edges.left + (self.edges.right - self.edges.left) * share

    def draw(self, title: str, lanes: dict[str, list[Bar]]) -> None:
        """Draw title, legend, time axis and lanes."""
        self.sheet.words(16, 34, title, size=18, bold=True)
        self._legend({bar.sort for bars in lanes.values() for bar in bars})
        self._lanes(lanes, "time since the step began")

    def zoomable(self, found: LaneBars) -> None:
        """Draw lanes for a script: the start, the duration and the names of each bar.

        A group holds the bars of one lane and sort; the script computes their positions.
        """
        with self.sheet.group('class="axis"'):
            self._axis(self.top + LANE * len(found.lanes), "time since the step began")
        _, unit_ps = unit_of(self.end_ps - self.begin_ps)
        numbers = {series.name: number for number, series in enumerate(found.series)}
        for lane, (stream, bars) in enumerate(found.lanes.items()):
            y = self.top + LANE * lane + (LANE - TALL) / 2
            self.sheet.words(4, y + TALL / 2 + 4, stream, size=min(13, 165 / len(stream)))
            of_sorts: dict[Sort, list[Bar]] = {}
            for bar in bars:
                of_sorts.setdefault(bar.sort, []).append(bar)
            for sort, some in of_sorts.items():
                word, colour = sort.value
                what = f'fill="{colour}" {data("sort", word)} data-series="{numbers[word]}"'
                with self.sheet.group(what):
                    for bar in some:
                        begin = (bar.start_ps - self.begin_ps) / unit_ps
                        long = (bar.end_ps - bar.start_ps) / unit_ps
                        at = f'data-at="{begin:.8g} {long:.5g}"'
                        self.sheet.span(y, TALL, f"{at} {_names(bar.names)}")

    def panel(self, close_up: CloseUp) -> None:
        """Draw a close-up: its title, time axis and lanes."""
        self.sheet.words(LEFT, self.top - 12, close_up.title, size=13, bold=True)
        self._lanes(close_up.bars, "")

    def _lanes(self, lanes: dict[str, list[Bar]], axis: str) -> None:
        self._axis(self.top + LANE * len(lanes), axis)
        for number, (stream, bars) in enumerate(lanes.items()):
            y = self.top + LANE * number + (LANE - TALL) / 2
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

    def _axis(self, below: float, title: str) -> None:
        long_ps = self.end_ps - self.begin_ps
        unit, unit_ps = unit_of(long_ps)
        steps = (factor * 10**power for power in range(16) for factor in (1, 2, 5))
        step_ps = next(step for step in steps if long_ps <= TICKS_MAX * step)
        for tick in range(0, long_ps + 1, step_ps):
            x = self._at(self.begin_ps + tick)
            self.sheet.line((x, self.top - 4), (x, below + 5), colour="#dde2e7", width=1)
            shown = f"{tick / unit_ps:g}" if title else f"+{tick / unit_ps:g} {unit}"
            self.sheet.words(x, below + 20, shown, size=12, anchor="middle")
        if title:
            words = f"{title}, {unit}"
            middle = (self.edges.left + self.edges.right) / 2
            self.sheet.words(middle, below + 40, words, size=12.5, anchor="middle", colour=FAINT)

    def _bar(self, bar: Bar, y: float) -> None:
        x = self._at(bar.start_ps)
        width = max(self._at(bar.end_ps) - x, 0.6)
        box = Box(x, y, width, TALL)
        self.sheet.bar(box, bar.sort.value[1])
        for size in (12.0, 10.0, 8.5):
            for name in bar.names:
                if LETTER * size * len(name) + 2 <= width:
                    self.sheet.inside(box.middle, y + TALL / 2 + size / 3, name, size=size)
                    return


def unit_of(long_ps: int) -> tuple[str, int]:
    """Return the largest unit of time not longer than `long_ps`, and its picoseconds."""
    units = (("s", 10**12), ("ms", 10**9), ("us", 10**6), ("ns", 10**3))
    return next(each for each in units if long_ps >= each[1] or each[1] == 10**3)


@cache
def _names(names: tuple[str, ...]) -> str:
    return data("names", "|".join(names)) if names else ""
