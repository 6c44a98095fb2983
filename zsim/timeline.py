"""A step as a picture: a lane for every stream, a bar for every operation.

It shows the last step of a run on the first rank of the trace, from the end of the step before to
its own: what is left of the step before is there too. A bar of a collective names the units whose
parameters or gradients it carries, or its size where they are not told apart.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import assert_never

from zsim.model import Model
from zsim.operation import (
    Action,
    AllGather,
    Allocate,
    AllReduce,
    Branch,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Receive,
    ReduceScatter,
    Send,
    SetScalar,
    Together,
)
from zsim.schedule import Program, Schedule
from zsim.sheet import FAINT, Box, Sheet
from zsim.summary import last_step
from zsim.trace import Trace
from zsim.units import format_bytes, format_seconds

WIDTH, LEFT, RIGHT = 1320.0, 128.0, 1300.0
"""The sheet; bars are between LEFT and RIGHT."""
TOP, LANE, TALL = 92.0, 46.0, 34.0
"""The first lane, from one lane to the next, and the height of a bar."""
LETTER = 0.62
"""Width of a letter as a share of its size: of DejaVu Sans on average, found by eye."""
TICKS_MAX = 14
"""Ticks of the time axis, at most."""


class TimelineError(ValueError):
    """A trace that cannot be drawn."""


class Sort(Enum):
    """What a bar is: its word in the legend, and its colour."""

    FORWARD = "forward", "#a8d5a2"
    RECOMPUTE = "recompute", "#d9efd3"
    BACKWARD = "backward", "#9cc3ec"
    UPDATE = "update", "#cdb4e6"
    GATHER = "gather", "#fbc778"
    REDUCE = "reduce-scatter", "#f2958d"
    ALL_REDUCE = "all-reduce", "#e77fb0"
    SEND = "send, receive, broadcast", "#8fd8d2"
    COPY = "copy, fill", "#b8c0c9"


@dataclass(frozen=True, slots=True)
class _Bar:
    """From when to when, in picoseconds; what it is, and what it is of, in long and in short."""

    start_ps: int
    end_ps: int
    sort: Sort
    names: tuple[str, ...] = ()


def timeline(schedule: Schedule, model: Model, trace: Trace) -> str:
    """The SVG of the last step of `trace`, a run of `schedule`, which trains `model`.

    Raises:
        TimelineError: the trace has no times.
    """
    begin_ps, end_ps = last_step(trace)
    if begin_ps == end_ps:
        raise TimelineError(f"backend {trace.backend} has no clock: there is no time to draw")
    rank = trace.ranks[0]
    program = next(each for each in schedule.programs if each.role == rank.role)
    labels = _Labels(schedule, program, model)
    lanes: dict[str, list[_Bar]] = {stream: [] for stream in schedule.streams}
    for event in rank.events:
        if event.end_ps > begin_ps and event.start_ps < end_ps:
            operation = program.by_id[event.operation]
            lanes[event.stream].append(
                _Bar(
                    max(event.start_ps, begin_ps),
                    min(event.end_ps, end_ps),
                    _sort(operation),
                    labels.of(operation),
                )
            )
    shown = {name: list(_joined(bars)) for name, bars in lanes.items() if bars}
    picture = _Picture(Sheet(WIDTH, TOP + LANE * len(shown) + 52), begin_ps, end_ps)
    took = format_seconds((end_ps - begin_ps) / 1e12)
    like = f" and {rank.stands_for - 1:,} like it" if rank.stands_for > 1 else ""
    picture.draw(f"{schedule.name}: one step of {took} on rank {rank.rank}{like}", shown)
    picture.sheet.words(RIGHT, picture.sheet.height - 12, labels.key, size=12.5, anchor="end")
    return picture.sheet.svg()


def _sort(operation: Operation) -> Sort:
    match operation:
        case Compute(action=action):
            return _sort_of_action(action)
        case AllGather():
            return Sort.GATHER
        case ReduceScatter():
            return Sort.REDUCE
        case AllReduce():
            return Sort.ALL_REDUCE
        case Broadcast() | Send() | Receive():
            return Sort.SEND
        case Together(members=members):
            return _sort(members[0])
        case Fill() | Copy():
            return Sort.COPY
        case Allocate() | Free() | HostWait() | SetScalar() | Branch():
            raise AssertionError(f"{operation.id}: an action of the host is on no stream")
        case _:
            assert_never(operation)


def _sort_of_action(action: Action) -> Sort:
    match action:
        case Action.FORWARD:
            return Sort.FORWARD
        case Action.RECOMPUTE:
            return Sort.RECOMPUTE
        case Action.BACKWARD:
            return Sort.BACKWARD
        case Action.UPDATE | Action.NORM | Action.UNSCALE | Action.CLIP | Action.FINITE:
            return Sort.UPDATE
        case Action.LOAD | Action.INITIALIZE:
            return Sort.COPY
        case _:
            assert_never(action)


class _Labels:
    """What stands in a bar: units, in long and in short, or bytes."""

    def __init__(self, schedule: Schedule, program: Program, model: Model) -> None:
        self.schedule = schedule
        self.program = program
        self.units = [unit.name for unit in model.units]
        self.users: dict[str, list[str]] = {}
        for unit in model.units:
            for parameter in unit.parameters:
                self.users.setdefault(parameter.name, []).append(unit.name)

    @property
    def key(self) -> str:
        """What short names stand for: the first unit of each letter."""
        firsts = {unit[0]: unit for unit in reversed(self.units)}
        shown = [unit for unit in self.units if unit in firsts.values() and _short(unit) != unit]
        return ", ".join(f"{_short(unit)}: {unit}" for unit in shown)

    def of(self, operation: Operation) -> tuple[str, ...]:
        """From the longest to the shortest; none for what needs no name."""
        match operation:
            case Compute(unit=unit) if unit:
                return unit, _short(unit)
            case Together(members=members):
                return self._collective(members)
            case AllGather() | ReduceScatter() | AllReduce():
                return self._collective((operation,))
            case _:
                return ()

    def _collective(self, members: Iterable[Communication]) -> tuple[str, ...]:
        carried: set[str] = set()
        size_bytes = 0
        for member in members:
            view = member.source if isinstance(member, ReduceScatter | Send) else member.target
            size_bytes += view.size * member.wire.size_bytes
            layout = self.program.by_name[view.buffer].layout
            if layout is not None:
                for piece in self.schedule.layout_by_name[layout].pieces:
                    carried.update(self.users.get(piece.parameter, ()))
        units = [unit for unit in self.units if unit in carried]
        if not units:
            return (format_bytes(size_bytes),)
        if len(units) == len(self.units) > 1:
            return ("all",)
        first = self.units.index(units[0])
        if len(units) > 2 and units == self.units[first : first + len(units)]:
            return f"{units[0]} to {units[-1]}", f"{_short(units[0])}-{_short(units[-1])}"
        return ", ".join(units), ",".join(map(_short, units))


def _short(unit: str) -> str:
    """The first letter of a unit and its number: "b3" of "block3"."""
    return unit[0] + "".join(letter for letter in unit[1:] if letter.isdecimal())


def _joined(bars: Iterable[_Bar]) -> Iterator[_Bar]:
    """The bars, copies without a pause between them as one."""
    for copies, run in groupby(sorted(bars, key=_start), lambda bar: bar.sort is Sort.COPY):
        current: _Bar | None = None
        for bar in run:
            if copies and current is not None and bar.start_ps <= current.end_ps:
                current = replace(current, end_ps=max(current.end_ps, bar.end_ps))
                continue
            if current is not None:
                yield current
            current = bar
        if current is not None:
            yield current


def _start(bar: _Bar) -> tuple[int, int]:
    return bar.start_ps, bar.end_ps


@dataclass(slots=True)
class _Picture:
    """A sheet, and the time from its left to its right."""

    sheet: Sheet
    begin_ps: int
    end_ps: int

    def _at(self, time_ps: int) -> float:
        return LEFT + (RIGHT - LEFT) * (time_ps - self.begin_ps) / (self.end_ps - self.begin_ps)

    def draw(self, title: str, lanes: dict[str, list[_Bar]]) -> None:
        """Title, legend, time axis and lanes."""
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

    def _bar(self, bar: _Bar, y: float) -> None:
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
