"""The last step of a rank as lanes: a lane for every stream, a bar for every operation.

The step starts at the end of the step before it, so late operations of that step appear too. The
bar of a collective names the units whose parameters or gradients it carries; if the units are
unknown, it shows the size.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import assert_never

from zsim.analysis.summary import last_step
from zsim.model.model import Model
from zsim.schedule.operation import (
    Action,
    Allocate,
    Branch,
    CollectiveOperation,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Read,
    ReducingOperation,
    SetScalar,
    Together,
    Write,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import RankTrace, Trace
from zsim.units import format_bytes


class Sort(Enum):
    """Sort of a bar: its name in the legend, and its colour."""

    FORWARD = "forward", "#a8d5a2"
    RECOMPUTE = "recompute", "#d9efd3"
    BACKWARD = "backward", "#9cc3ec"
    UPDATE = "update", "#cdb4e6"
    GATHER = "gather", "#fbc778"
    REDUCE = "reduce-scatter", "#f2958d"
    ALL_REDUCE = "all-reduce", "#e77fb0"
    SEND = "send, receive, broadcast", "#8fd8d2"
    FILE = "file read, file write", "#5c7f92"
    COPY = "copy, fill", "#b8c0c9"


@dataclass(frozen=True, slots=True)
class Bar:
    """Start and end in picoseconds, sort, and labels from the longest to the shortest."""

    start_ps: int
    end_ps: int
    sort: Sort
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Bars of the last step by stream, and a legend of their short names."""

    bars: dict[str, list[Bar]]
    key: str


def lanes(schedule: Schedule, model: Model, trace: Trace, rank: RankTrace) -> Lanes:
    """Return the lanes of `rank` in the last step of `trace`, a run of `schedule` for `model`."""
    begin_ps, end_ps = last_step(trace)
    program = schedule.program_of(rank.rank)
    labels = _Labels(schedule, program, model)
    found: dict[str, list[Bar]] = {stream: [] for stream in schedule.streams}
    for event in rank.events:
        if event.end_ps > begin_ps and event.start_ps < end_ps:
            operation = program.by_id[event.operation]
            found[event.stream].append(
                Bar(
                    max(event.start_ps, begin_ps),
                    min(event.end_ps, end_ps),
                    _sort(operation),
                    labels.of(operation),
                )
            )
    shown = {name: list(_joined(bars)) for name, bars in found.items() if bars}
    return Lanes(bars=shown, key=labels.key)


def _sort(operation: Operation) -> Sort:
    match operation:
        case Compute(action=action):
            return _sort_of_action(action)
        case ReducingOperation():
            return Sort.REDUCE if operation.splits else Sort.ALL_REDUCE
        case CollectiveOperation(joins=True, splits=False):
            return Sort.GATHER
        case Communication():
            return Sort.SEND
        case Together(members=members):
            return _sort(members[0])
        case Read() | Write():
            return Sort.FILE
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
        case Action.BACKWARD | Action.BACKWARD_INPUT | Action.BACKWARD_WEIGHT:
            return Sort.BACKWARD
        case (
            Action.UPDATE | Action.NORM | Action.UNSCALE | Action.CLIP | Action.FINITE | Action.AMAX
        ):
            return Sort.UPDATE
        case (
            Action.LOAD | Action.INITIALIZE | Action.COMPRESS | Action.DECOMPRESS | Action.RESIDUAL
        ):
            return Sort.COPY
        case _:
            assert_never(action)


class _Labels:
    """Labels of bars: long and short names of units, or bytes."""

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
        """Legend of short names, with the first unit of each letter."""
        firsts = {unit[0]: unit for unit in reversed(self.units)}
        shown = [unit for unit in self.units if unit in firsts.values() and _short(unit) != unit]
        return ", ".join(f"{_short(unit)}: {unit}" for unit in shown)

    def of(self, operation: Operation) -> tuple[str, ...]:
        """Return labels from the longest to the shortest; empty for operations without a label."""
        match operation:
            case Compute(unit=unit) if unit:
                return unit, _short(unit)
            case Together(members=members):
                return self._collective(members)
            case CollectiveOperation() if _sort(operation) is not Sort.SEND:
                return self._collective((operation,))
            case _:
                return ()

    def _collective(self, members: Iterable[Communication]) -> tuple[str, ...]:
        carried: set[str] = set()
        size_bytes = 0
        for member in members:
            in_target = isinstance(member, CollectiveOperation) and not member.splits
            view = (in_target and member.writes) or member.brought
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
    """Return the first letter of a unit and its number: "b3" for "block3"."""
    return unit[0] + "".join(letter for letter in unit[1:] if letter.isdecimal())


def _joined(bars: Iterable[Bar]) -> Iterator[Bar]:
    """Yield the bars, merging copies that follow each other without a gap."""
    for copies, run in groupby(sorted(bars, key=_start), lambda bar: bar.sort is Sort.COPY):
        current: Bar | None = None
        for bar in run:
            if copies and current is not None and bar.start_ps <= current.end_ps:
                current = replace(current, end_ps=max(current.end_ps, bar.end_ps))
                continue
            if current is not None:
                yield current
            current = bar
        if current is not None:
            yield current


def _start(bar: Bar) -> tuple[int, int]:
    return bar.start_ps, bar.end_ps
