"""Vector clocks of timelines: CUDA streams or host threads, each a sequence of operations."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from zsim_record.clocks.call_stack import CallStack


class TimelineKind(StrEnum):
    """Kinds of timelines."""

    STREAM = "stream"
    HOST = "host"


class Tick(NamedTuple):
    """A position on a timeline: its `time`-th operation."""

    timeline: int
    time: int


class ClockMark(NamedTuple):
    """Everything ordered before a position; recorded by an event."""

    timeline: int
    clock: tuple[int, ...]


@dataclass(slots=True, eq=False)
class ClockTimeline:
    """A sequence of operations, with a vector clock: how far each timeline is ordered before it."""

    number: int
    name: str
    kind: TimelineKind
    clock: list[int]
    waits: dict[int, CallStack | None] = field(default_factory=dict[int, CallStack | None])
    """Stack of the last wait for each other timeline."""

    @property
    def is_host(self) -> bool:
        """Return True for a host thread."""
        return self.kind is TimelineKind.HOST

    def is_after(self, tick: Tick) -> bool:
        """Return True if the next operation on this timeline is ordered after `tick`."""
        number, time = tick
        clock = self.clock
        return number < len(clock) and clock[number] >= time


class StreamClocks:
    """Timelines of one process and the order among their operations."""

    def __init__(self) -> None:
        self.timelines: list[ClockTimeline] = []

    def stream(self, name: str) -> ClockTimeline:
        """Add a stream of a device."""
        return self._add(name, TimelineKind.STREAM)

    def host(self, name: str = "host") -> ClockTimeline:
        """Add a thread of the host."""
        return self._add(name, TimelineKind.HOST)

    def launch(self, host: ClockTimeline, stream: ClockTimeline) -> Tick:
        """Enqueue an operation on `stream`, after everything that `host` has seen finish."""
        _join(stream.clock, host.clock)
        return self.advance(stream)

    def record(self, host: ClockTimeline, stream: ClockTimeline) -> ClockMark:
        """Enqueue an event on `stream`; return the mark that a wait for the event inherits."""
        _join(stream.clock, host.clock)
        return self.mark(stream)

    def advance(self, timeline: ClockTimeline) -> Tick:
        """Advance `timeline` by one operation; return its tick."""
        number = timeline.number
        timeline.clock[number] += 1
        return Tick(number, timeline.clock[number])

    def mark(self, timeline: ClockTimeline) -> ClockMark:
        """Return the mark of the current position of `timeline`."""
        return ClockMark(timeline.number, tuple(timeline.clock))

    def wait(
        self, timeline: ClockTimeline, mark: ClockMark, stack: CallStack | None = None
    ) -> None:
        """Order later operations of `timeline` after `mark`."""
        _join(timeline.clock, mark.clock)
        if mark.timeline != timeline.number:
            timeline.waits[mark.timeline] = stack

    def follow(
        self, later: ClockTimeline, earlier: ClockTimeline, stack: CallStack | None = None
    ) -> None:
        """Order later operations of `later` after all operations so far of `earlier`."""
        self.wait(later, self.mark(earlier), stack)

    def assume(self, later: ClockTimeline, tick: Tick, clock: tuple[int, ...] = ()) -> None:
        """Assume that later operations of `later` are ordered after `tick` and `clock`."""
        own = [0] * tick.timeline + [tick.time]
        _join(later.clock, own)
        _join(later.clock, clock)

    def _add(self, name: str, kind: TimelineKind) -> ClockTimeline:
        number = len(self.timelines)
        timeline = ClockTimeline(number, name, kind, [0] * (number + 1))
        self.timelines.append(timeline)
        return timeline


def _join(clock: list[int], other: Iterable[int]) -> None:
    """Raise `clock` to the element-wise maximum of both."""
    length = len(clock)
    for number, time in enumerate(other):
        if number >= length:
            clock.append(time)
        elif time > clock[number]:
            clock[number] = time
