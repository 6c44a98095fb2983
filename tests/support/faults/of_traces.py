"""Faults of recorded traces: one thing that no run of the schedule can have left.

Nothing here knows the checker: that the result is impossible follows from the change.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from faults.fault import BackEnd, Fault, Mutant, one_of
from faults.judge import Known
from zsim.proof import against_trace
from zsim.schedule.operation import Branch, StreamOperation, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import Event, RankTrace, Trace, Transfer

T = TypeVar("T")


@dataclass(frozen=True)
class Recorded:
    """A trace and the schedule whose run it is: a job of the judge."""

    schedule: Schedule
    trace: Trace
    label: str = "a trace"
    instead: frozenset[str] = frozenset()

    @property
    def subject(self) -> "Recorded":
        """The trace with its schedule."""
        return self

    def findings(self, made: Trace) -> dict[str, list[str]]:
        """Return findings of the checker of traces."""
        found = [each.why for each in against_trace.examine(self.schedule, made)]
        return {"refinement": found} if found else {}

    def truth(self, made: Trace, _: object) -> Known:
        """Return that a trace is wrong if it is another one."""
        return Known(is_wrong=made != self.trace)


def _optional(program: Program) -> set[str]:
    """Return operations of branches: whether they run is up to the run."""
    return {
        inner.id
        for operation in walk(program.step)
        if isinstance(operation, Branch)
        for side in (operation.then, operation.otherwise)
        for inner in walk(side)
    }


class Mutator:
    """One rank of a trace, and the changes of it.

    A change raises a ValueError where there is nothing to change, or if the result is no trace.
    """

    def __init__(self, recorded: Recorded, rng: np.random.Generator) -> None:
        self._trace = recorded.trace
        self._rng = rng
        self._rank: RankTrace = one_of(rng, recorded.trace.ranks)
        self._program = recorded.schedule.program_of(self._rank.rank)
        optional = _optional(self._program)
        self._certain = [
            place
            for place, event in enumerate(self._rank.events)
            if event.operation not in optional
        ]

    def _choose(self, among: Sequence[T]) -> T:
        return one_of(self._rng, among)

    def _with(self, rank: RankTrace) -> Trace:
        ranks = [rank if one is self._rank else one for one in self._trace.ranks]
        return replace(self._trace, ranks=tuple(ranks))

    def _events(self, changed: dict[int, Event | None]) -> Trace:
        events = [changed.get(place, event) for place, event in enumerate(self._rank.events)]
        return self._with(
            replace(self._rank, events=tuple(event for event in events if event is not None))
        )

    def _event(self, change: Callable[[Event], Event]) -> Trace:
        """Change one event."""
        place = self._choose(range(len(self._rank.events)))
        return self._events({place: change(self._rank.events[place])})

    def drop_event(self) -> Trace:
        """Leave the event of an operation out."""
        return self._events({self._choose(self._certain): None})

    def repeat_event(self) -> Trace:
        """Repeat an event."""
        again = self._choose(self._rank.events)
        return self._with(replace(self._rank, events=(*self._rank.events, again)))

    def rename_event(self) -> Trace:
        """Name an operation that the schedule does not have."""
        return self._event(lambda each: replace(each, operation=f"{each.operation}x"))

    def _neighbours(self) -> list[tuple[int, int]]:
        """Return places of events that follow each other on a stream."""
        last: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        for place, event in enumerate(self._rank.events):
            if event.stream in last:
                found.append((last[event.stream], place))
            last[event.stream] = place
        return found

    def swap_events(self) -> Trace:
        """Exchange two operations of a stream, each at the other's time."""
        one, other = self._choose(self._neighbours())
        first, second = self._rank.events[one], self._rank.events[other]
        return self._events(
            {
                one: replace(first, operation=second.operation, step=second.step),
                other: replace(second, operation=first.operation, step=first.step),
            }
        )

    def swap_times(self) -> Trace:
        """Exchange the times of two operations of a stream."""
        events = self._rank.events
        pairs = [
            (one, other)
            for one, other in self._neighbours()
            if events[one].start_ps < events[other].start_ps < events[other].end_ps
        ]
        one, other = self._choose(pairs)
        first, second = events[one], events[other]
        return self._events(
            {
                one: replace(first, start_ps=second.start_ps, end_ps=second.end_ps),
                other: replace(second, start_ps=first.start_ps, end_ps=first.end_ps),
            }
        )

    def overlap(self) -> Trace:
        """Begin an operation before the end of the one before it on its stream."""
        events = self._rank.events
        pairs = [
            (one, other)
            for one, other in self._neighbours()
            if events[one].start_ps < events[one].end_ps
        ]
        one, other = self._choose(pairs)
        return self._events({other: replace(events[other], start_ps=events[one].end_ps - 1)})

    def ignore_an_edge(self) -> Trace:
        """Begin an operation before the end of one that it waits for."""
        events = self._rank.events
        ends = {(event.step, event.operation): event.end_ps for event in events}
        found: list[tuple[int, int]] = []
        for place, event in enumerate(events):
            operation = self._program.by_id[event.operation]
            assert isinstance(operation, StreamOperation)
            found += [
                (place, ends[event.step, edge])
                for edge in operation.after
                if isinstance(edge, str) and (event.step, edge) in ends
            ]
        place, end_ps = self._choose(found)
        return self._events({place: replace(events[place], start_ps=end_ps - 1)})

    def change_stream(self) -> Trace:
        """Run an operation on a stream of its own."""
        return self._event(lambda each: replace(each, stream="elsewhere"))

    def end_before_start(self) -> Trace:
        """End an operation before it begins."""
        return self._event(lambda each: replace(each, end_ps=each.start_ps - 1))

    def cut_a_step(self) -> Trace:
        """End a step before its last operation."""
        last = {event.step: event.end_ps for event in self._rank.events if event.step >= 0}
        step = self._choose(sorted(last))
        ends = list(self._trace.step_end_ps)
        ends[step] = max(e.end_ps for e in self._rank.events if e.step == step) - 1
        return replace(self._trace, step_end_ps=tuple(ends))

    def lose_a_step(self) -> Trace:
        """Leave out all operations of a rank in the last step."""
        last = self._trace.steps - 1
        if not any(self._rank.events[place].step == last for place in self._certain):
            raise ValueError("the last step may have no operations")
        events = tuple(each for each in self._rank.events if each.step != last)
        return self._with(replace(self._rank, events=events))

    def _transfers(self, place: int, changed: Transfer | None) -> Trace:
        kept = [changed if at == place else t for at, t in enumerate(self._rank.transfers)]
        transfers = tuple(each for each in kept if each is not None)
        return self._with(replace(self._rank, transfers=transfers))

    def change_a_transfer(self) -> Trace:
        """Give a communicator something else, or nothing."""
        place = self._choose(range(len(self._rank.transfers)))
        each = self._rank.transfers[place]
        changes = [
            None,
            replace(each, elements=each.elements + 1),
            replace(each, bytes=each.bytes + 1),
            replace(each, group=f"{each.group}x"),
            replace(each, collective="scatter"),
            replace(each, scalar=not each.scalar),
            replace(each, step=each.step + 1),
        ]
        return self._transfers(place, self._choose(changes))

    def swap_transfers(self) -> Trace:
        """Exchange two transfers."""
        transfers = list(self._rank.transfers)
        place = self._choose(range(len(transfers) - 1))
        transfers[place : place + 2] = transfers[place + 1], transfers[place]
        return self._with(replace(self._rank, transfers=tuple(transfers)))

    def change_the_book(self) -> Trace:
        """Lose or double a line of the book, or change its size, pool or buffer."""
        book = list(self._rank.book)
        place = self._choose(range(len(book)))
        entry = book[place]
        changes = [
            [],
            [entry, entry],
            [replace(entry, change_bytes=2 * entry.change_bytes)] if entry.change_bytes else [],
            [replace(entry, pool=f"{entry.pool}x")],
            [replace(entry, buffer=f"{entry.buffer}x")],
        ]
        book[place : place + 1] = self._choose(changes)
        return self._with(replace(self._rank, book=tuple(book)))

    def swap_lines(self) -> Trace:
        """Exchange two lines of the book."""
        book = list(self._rank.book)
        place = self._choose(range(len(book) - 1))
        book[place : place + 2] = book[place + 1], book[place]
        return self._with(replace(self._rank, book=tuple(book)))

    def miscount(self) -> Trace:
        """Lose a rank or have it twice; let it stand for one more, or play another role."""
        more = replace(self._rank, stands_for=self._rank.stands_for + 1)
        other = replace(self._rank, role=f"{self._rank.role}x")
        ranks = [one for one in self._trace.ranks if one is not self._rank]
        made = self._choose([[], [more], [other], [self._rank, self._rank]])
        return replace(self._trace, ranks=(*ranks, *made))


CHANGES: tuple[Callable[[Mutator], Trace], ...] = (
    Mutator.drop_event,
    Mutator.repeat_event,
    Mutator.rename_event,
    Mutator.swap_events,
    Mutator.swap_times,
    Mutator.overlap,
    Mutator.ignore_an_edge,
    Mutator.change_stream,
    Mutator.end_before_start,
    Mutator.cut_a_step,
    Mutator.lose_a_step,
    Mutator.change_a_transfer,
    Mutator.swap_transfers,
    Mutator.change_the_book,
    Mutator.swap_lines,
    Mutator.miscount,
)


def _yields(
    change: Callable[[Mutator], Trace], recorded: Recorded, rng: np.random.Generator
) -> Iterator[Mutant[Trace]]:
    try:
        made = change(Mutator(recorded, rng))
    except ValueError:
        return
    if made != recorded.trace:
        yield Mutant.of(change.__name__, made)


FAULTS_OF_TRACES: tuple[Fault[Recorded, Trace], ...] = tuple(
    Fault(
        each.__name__.replace("_", " "),
        "traces",
        BackEnd.TRACE,
        frozenset({"refinement"}),
        partial(_yields, each),
    )
    for each in CHANGES
)
