"""Find the step that a recording repeats; its last two steps must have equal operations.

Dependencies and memory are described relative to a step: in the same step, or a number of steps
ago. Memory that no step allocates or frees is permanent.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from zsim_record.clocks.stream_clock import Tick
from zsim_record.lift.step_events import (
    Allocation,
    Drop,
    Event,
    Launch,
    LiftError,
    StepEvents,
    Touch,
    ordered,
)


class EventPlace(NamedTuple):
    """The event at `position` of the step `lag` steps ago."""

    lag: int
    position: int


class BlockKey(NamedTuple):
    """A block, by the `position` of its allocation `lag` steps ago; `lag` is None if permanent."""

    lag: int | None
    position: int


@dataclass(slots=True)
class Lifetime:
    """Lifetime of a block that each step allocates: its allocation, and the drop that frees it."""

    allocated: int
    dropped: EventPlace
    """Its lag is the number of steps after the allocation."""

    @property
    def copies(self) -> int:
        """Return how many instances alternate: two if the next is allocated before one is freed."""
        return max(1, self.dropped.lag + (self.dropped.position > self.allocated))


@dataclass(slots=True)
class RepeatedStep:
    """The last step of a recording, which equals the one `before` it."""

    journal: StepEvents
    before: list[Event] = field(init=False)
    events: list[Event] = field(init=False)
    lifetimes: dict[int, Lifetime] = field(init=False)
    """Lifetimes of blocks, by the position of their allocation."""
    permanent: list[int] = field(init=False)
    """Blocks that are live throughout."""
    turns: int = field(init=False)
    """Repetitions per step of the schedule, so that each block keeps its name."""
    _last: int = field(init=False)
    _born: dict[int, tuple[int, int]] = field(init=False)
    _places: dict[int, tuple[list[int], list[tuple[int, int]]]] = field(init=False)
    """For each timeline, the times of its operations, and the step and position of each."""

    def __post_init__(self) -> None:
        steps = self.journal.steps
        if len(steps) < 4:
            raise LiftError(
                f"{len(steps) - 1} steps are recorded, at least 3 are needed: the first sets up, "
                "two have to be the same (optimizer.step() ends a step, or tape.end_step())"
            )
        self._last = len(steps) - 2  # events after the last end do not form a whole step
        self.before = steps[self._last - 1]
        self.events = _without_teardown(steps[self._last], self.before)
        self._born, self._places = {}, {}
        for number, events in enumerate(steps):
            for position, event in enumerate(events):
                if isinstance(event, Allocation):
                    self._born[event.block] = number, position
                elif isinstance(event, Launch):
                    times, places = self._places.setdefault(event.timeline, ([], []))
                    times.append(event.time)
                    places.append((number, position))
        self._need_equal()
        self.lifetimes = self._lifetimes()
        self.turns = max((each.copies for each in self.lifetimes.values()), default=1)
        dead = {
            each.block
            for events in (*steps[: self._last], self.events)
            for each in events
            if isinstance(each, Drop)
        }
        self.permanent = [
            block
            for block, (number, _) in self._born.items()
            if number < self._last - 1 and block not in dead
        ]

    def latest(self, timeline: int, time: int) -> tuple[int, EventPlace] | None:
        """Return the last operation of a timeline up to `time`, with its time.

        The result is None if the operation is more than one step old.
        """
        return self._latest(timeline, time, self._last)

    def _latest(self, timeline: int, time: int, step: int) -> tuple[int, EventPlace] | None:
        times, places = self._places.get(timeline, ([], []))
        index = bisect_right(times, time)
        if not index:
            return None
        number, position = places[index - 1]
        lag = step - number
        return (times[index - 1], EventPlace(lag, position)) if lag <= 1 else None

    def key(self, block: int) -> BlockKey:
        """Return the key of a journal's block in the repeated step."""
        step, position = self._born[block]
        lag = self._last - step
        return BlockKey(lag, position) if lag <= 1 else BlockKey(None, block)

    def _lifetimes(self) -> dict[int, Lifetime]:
        dropped: dict[tuple[int, int], EventPlace] = {}
        for number, events in ((self._last - 1, self.before), (self._last, self.events)):
            for position, event in enumerate(events):
                if isinstance(event, Drop):
                    step, at = self._born[event.block]
                    dropped[step, at] = EventPlace(number - step, position)
        found: dict[int, Lifetime] = {}
        for position, event in enumerate(self.events):
            if not isinstance(event, Allocation):
                continue
            end = dropped.get((self._last, position)) or dropped.get((self._last - 1, position))
            if end is None:
                facts = self.journal.blocks[event.block]
                raise LiftError(
                    f"{facts.label}, allocated at {facts.site}, outlives the step after its own: "
                    "memory grows, or it is kept for several steps"
                )
            found[position] = Lifetime(position, end)
        return found

    def _need_equal(self) -> None:
        """Raise LiftError unless the last two steps are equal.

        The message names the first difference.
        """
        before, last = (
            self._forms(self.before, self._last - 1),
            self._forms(self.events, self._last),
        )
        for (one, earlier), (other, later) in zip(before, last, strict=False):
            if one != other:
                what = f"{self._event_text(earlier)} in one, {self._event_text(later)} in the other"
                raise self._differing(what)
        counts = len(self.before), len(self.events)
        if len(set(counts)) > 1:
            extra = self._event_text(max(self.before, self.events, key=len)[min(counts)])
            raise self._differing(f"only one has {extra}")

    def _differing(self, what: str) -> LiftError:
        count = self._last + 1
        return LiftError(f"the last two steps differ: {what}; of {count} steps, the first set up")

    def _forms(self, events: list[Event], step: int) -> Iterator[tuple[object, Event]]:
        """Yield each event in a form that is equal in equal steps."""
        for event in events:
            match event:
                case Launch():
                    touches = tuple(self._form_of(each, step) for each in event.touches)
                    after = tuple(self._within(step, *each) for each in enumerate(event.clock))
                    yield (event.timeline, event.name, touches, after, event.call), event
                case Allocation(block=block):
                    yield self.journal.blocks[block], event
                case Drop(block=block):
                    yield self._key_in(block, step), event

    def _form_of(self, touch: Touch, step: int) -> tuple[object, ...]:
        return self._key_in(touch.block, step), touch.region, touch.writes

    def _key_in(self, block: int, step: int) -> object:
        """Return the key of `block` as seen from `step`.

        Positions in the previous step are not compared, since it may be the first step.
        """
        born, position = self._born[block]
        if born == step:
            return position
        return self.journal.blocks[block]

    def _within(self, step: int, timeline: int, time: int) -> int | None:
        """Return the position of a dependency on a timeline, if it is in the same step."""
        found = self._latest(timeline, time, step)
        return None if found is None or found[1].lag else found[1].position

    def _event_text(self, event: Event) -> str:
        if isinstance(event, Launch):
            return f"{event.name} at {event.site}"
        what = "an allocation" if isinstance(event, Allocation) else "the end"
        facts = self.journal.blocks[event.block]
        return f"{what} of {facts.label}, allocated at {facts.site}"


def _without_teardown(events: list[Event], before: list[Event]) -> list[Event]:
    """Return a step without the drops that only happened after the script ended."""
    kept = len(events) - _trailing_drops(events) + _trailing_drops(before)
    return events[:kept]


def _trailing_drops(events: list[Event]) -> int:
    return next(
        (count for count, each in enumerate(reversed(events)) if not isinstance(each, Drop)),
        len(events),
    )


@dataclass(frozen=True, slots=True)
class OrderedEvent:
    """An event with the operations that the host waits for before it, and its dependencies.

    Redundant dependencies are omitted: those that the stream or host has already waited for, and
    those ordered before another dependency. A drop depends on the uses that the next operation of
    its home stream depends on: the stream waits for them there at the latest.
    """

    event: Event
    host_waits: tuple[EventPlace, ...]
    after: tuple[EventPlace, ...]


class _Reduction:
    """Finds the waits of a step that others do not imply."""

    def __init__(self, step: RepeatedStep) -> None:
        self.step = step
        self.clocks = {
            (each.timeline, each.time): each.clock
            for events in step.journal.steps
            for each in events
            if isinstance(each, Launch)
        }

    def run(self) -> Iterator[OrderedEvent]:
        before, step = self.step.before, self.step
        host = before[-1].host if before else ()
        streams = {each.timeline: each.clock for each in before if isinstance(each, Launch)}
        for position, event in enumerate(step.events):
            waits = self._needed(event.host, host, own=step.journal.host)
            host = event.host
            after: tuple[EventPlace, ...] = ()
            if isinstance(event, Launch):
                known = _later(streams.get(event.timeline, ()), host)
                after = self._needed(event.clock, known, own=event.timeline)
                streams[event.timeline] = event.clock
            elif isinstance(event, Drop) and event.recorded:
                after = self._deferred(event, host)
            elif isinstance(event, Drop) and event.uses:
                home = step.journal.blocks[event.block].home
                if home is not None:
                    known = _later(streams.get(home, ()), host)
                    after, streams[home] = self._awaited(event, position, known, home)
            yield OrderedEvent(event, waits, after)

    def _deferred(self, drop: Drop, host: Sequence[int]) -> tuple[EventPlace, ...]:
        """Return the uses that the allocator waits for, unless the host has seen them finish."""
        found = [self.step.latest(*tick) for tick in drop.recorded if not ordered(host, tick)]
        return tuple(each[1] for each in found if each is not None)

    def _awaited(
        self, drop: Drop, position: int, known: tuple[int, ...], home: int
    ) -> tuple[tuple[EventPlace, ...], tuple[int, ...]]:
        """Return the uses that the home stream waits for, and its clock afterwards."""
        clock = [0] * (1 + max(tick.timeline for tick in drop.uses))
        for timeline in self._covered(drop, position, home):
            clock[timeline] = next(each.time for each in drop.uses if each.timeline == timeline)
        after = self._needed(clock, known, own=home)
        for place in after:
            launch = (self.step.before if place.lag else self.step.events)[place.position]
            assert isinstance(launch, Launch)
            known = _later(known, launch.clock)
        return after, known

    def _covered(self, drop: Drop, position: int, home: int) -> Iterator[int]:
        """Yield the streams whose uses precede the next operation of the home stream."""
        behind = self._first(self.step.events[position + 1 :], home)
        uses = drop.uses
        if behind is None:  # look one step back
            earlier = self.step.before[position]
            assert isinstance(earlier, Drop)
            behind, uses = self._first(self.step.events, home), earlier.uses
        for tick in uses:
            if behind is not None and ordered(behind.clock, tick):
                yield tick.timeline

    def _first(self, events: Sequence[Event], timeline: int) -> Launch | None:
        found = (each for each in events if isinstance(each, Launch) and each.timeline == timeline)
        return next(found, None)

    def _needed(
        self, clock: Sequence[int], known: Sequence[int], *, own: int
    ) -> tuple[EventPlace, ...]:
        """Return the operations up to `clock` that `known` does not cover."""
        found: list[tuple[int, int, EventPlace]] = []
        for timeline, time in enumerate(clock):
            if timeline in (own, self.step.journal.host):
                continue
            if time > (known[timeline] if timeline < len(known) else 0):
                last = self.step.latest(timeline, time)
                if last is not None:
                    found.append((timeline, *last))
        return tuple(
            place
            for timeline, time, place in found
            if not any(
                other != timeline and ordered(self.clocks[other, at], Tick(timeline, time))
                for other, at, _ in found
            )
        )


def _later(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(max(pair) for pair in zip_longest(one, other, fillvalue=0))


def in_order(step: RepeatedStep) -> list[OrderedEvent]:
    """Return the events of a step with their dependencies."""
    return list(_Reduction(step).run())
