"""Traces that no schedule allows: a right one with one thing changed.

A mutation takes a trace of which its rank's program is known, and a function that chooses; it gives
what it names and the changed trace, or None if there is nothing to change. Nothing here knows the
checker: that the result is impossible follows from what was changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from zsim.schedule.operation import Branch, StreamOperation, walk
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import BookEntry, Event, RankTrace, Trace, Transfer

T = TypeVar("T")


class Choose(Protocol):
    """Picks one of several."""

    def __call__(self, among: Sequence[T]) -> T:
        """One of `among`."""
        ...


def _optional(program: Program) -> set[str]:
    """Operations of branches: whether they run is up to the run."""
    return {
        inner.id
        for operation in walk(program.step)
        if isinstance(operation, Branch)
        for side in (operation.then, operation.otherwise)
        for inner in walk(side)
    }


class Mutator:
    """One rank of a trace of `schedule`, and what can be done to it."""

    def __init__(self, schedule: Schedule, trace: Trace, choose: Choose) -> None:
        self._trace = trace
        self._choose = choose
        self._rank: RankTrace = choose(trace.ranks)
        self._program = schedule.program_of(self._rank.rank)
        optional = _optional(self._program)
        self._certain = [
            place
            for place, event in enumerate(self._rank.events)
            if event.operation not in optional
        ]

    def _with(self, rank: RankTrace) -> Trace:
        ranks = [rank if one is self._rank else one for one in self._trace.ranks]
        return replace(self._trace, ranks=tuple(ranks))

    def _events(self, changed: dict[int, Event | None]) -> Trace:
        events = [changed.get(place, event) for place, event in enumerate(self._rank.events)]
        return self._with(
            replace(self._rank, events=tuple(event for event in events if event is not None))
        )

    def drop_event(self) -> Trace | None:
        """An operation did not run."""
        return self._events({self._choose(self._certain): None}) if self._certain else None

    def repeat_event(self) -> Trace | None:
        """An operation ran twice."""
        if not self._rank.events:
            return None
        again = self._choose(self._rank.events)
        return self._with(replace(self._rank, events=(*self._rank.events, again)))

    def rename_event(self) -> Trace | None:
        """Something ran that the schedule does not have."""
        if not self._rank.events:
            return None
        place = self._choose(range(len(self._rank.events)))
        event = self._rank.events[place]
        return self._events({place: replace(event, operation=f"{event.operation}x")})

    def _neighbours(self) -> list[tuple[int, int]]:
        """Places of events that follow each other on a stream."""
        last: dict[str, int] = {}
        found: list[tuple[int, int]] = []
        for place, event in enumerate(self._rank.events):
            if event.stream in last:
                found.append((last[event.stream], place))
            last[event.stream] = place
        return found

    def swap_events(self) -> Trace | None:
        """Two operations of a stream ran the other way round, each at the other's time."""
        pairs = self._neighbours()
        if not pairs:
            return None
        one, other = self._choose(pairs)
        first, second = self._rank.events[one], self._rank.events[other]
        return self._events(
            {
                one: replace(first, operation=second.operation, step=second.step),
                other: replace(second, operation=first.operation, step=first.step),
            }
        )

    def swap_times(self) -> Trace | None:
        """An operation has the time of the next one on its stream, and the reverse."""
        events = self._rank.events
        pairs = [
            (one, other)
            for one, other in self._neighbours()
            if events[one].start_ps < events[other].start_ps < events[other].end_ps
        ]
        if not pairs:
            return None
        one, other = self._choose(pairs)
        first, second = events[one], events[other]
        return self._events(
            {
                one: replace(first, start_ps=second.start_ps, end_ps=second.end_ps),
                other: replace(second, start_ps=first.start_ps, end_ps=first.end_ps),
            }
        )

    def overlap(self) -> Trace | None:
        """An operation began before the one before it on its stream had ended."""
        events = self._rank.events
        pairs = [
            (one, other)
            for one, other in self._neighbours()
            if events[one].start_ps < events[one].end_ps
        ]
        if not pairs:
            return None
        one, other = self._choose(pairs)
        return self._events({other: replace(events[other], start_ps=events[one].end_ps - 1)})

    def ignore_an_edge(self) -> Trace | None:
        """An operation began before something in its `after` had ended."""
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
        if not found:
            return None
        place, end_ps = self._choose(found)
        return self._events({place: replace(events[place], start_ps=end_ps - 1)})

    def change_stream(self) -> Trace | None:
        """An operation ran on a stream of its own."""
        if not self._rank.events:
            return None
        place = self._choose(range(len(self._rank.events)))
        return self._events({place: replace(self._rank.events[place], stream="elsewhere")})

    def end_before_start(self) -> Trace | None:
        """An operation ended before it began."""
        if not self._rank.events:
            return None
        place = self._choose(range(len(self._rank.events)))
        event = self._rank.events[place]
        return self._events({place: replace(event, end_ps=event.start_ps - 1)})

    def cut_a_step(self) -> Trace | None:
        """A step ended before something in it."""
        last = {event.step: event.end_ps for event in self._rank.events if event.step >= 0}
        if not last:
            return None
        step = self._choose(sorted(last))
        ends = list(self._trace.step_end_ps)
        ends[step] = max(e.end_ps for e in self._rank.events if e.step == step) - 1
        return replace(self._trace, step_end_ps=tuple(ends))

    def lose_a_step(self) -> Trace | None:
        """The last step has an end, but no operations of this rank."""
        last = self._trace.steps - 1
        if not any(self._rank.events[place].step == last for place in self._certain):
            return None
        events = tuple(each for each in self._rank.events if each.step != last)
        return self._with(replace(self._rank, events=events))

    def _transfers(self, place: int, changed: Transfer | None) -> Trace:
        kept = [changed if at == place else t for at, t in enumerate(self._rank.transfers)]
        transfers = tuple(each for each in kept if each is not None)
        return self._with(replace(self._rank, transfers=transfers))

    def change_a_transfer(self) -> Trace | None:
        """A communicator was handed something else, or nothing."""
        if not self._rank.transfers:
            return None
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

    def swap_transfers(self) -> Trace | None:
        """Communicators were handed two operations the other way round."""
        transfers = list(self._rank.transfers)
        if len(transfers) < 2:
            return None
        place = self._choose(range(len(transfers) - 1))
        transfers[place : place + 2] = transfers[place + 1], transfers[place]
        return self._with(replace(self._rank, transfers=tuple(transfers)))

    def change_the_book(self) -> Trace | None:
        """A line of the book is lost, doubled, of another size, pool or kind."""
        if not self._rank.book:
            return None
        book: list[BookEntry] = list(self._rank.book)
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

    def swap_lines(self) -> Trace | None:
        """Two lines of the book stand the other way round."""
        book = list(self._rank.book)
        if len(book) < 2:
            return None
        place = self._choose(range(len(book) - 1))
        book[place : place + 2] = book[place + 1], book[place]
        return self._with(replace(self._rank, book=tuple(book)))

    def miscount(self) -> Trace | None:
        """A rank is there twice, stands for one more, or plays another role."""
        more = replace(self._rank, stands_for=self._rank.stands_for + 1)
        other = replace(self._rank, role=f"{self._rank.role}x")
        ranks = [one for one in self._trace.ranks if one is not self._rank]
        made = self._choose([[], [more], [other], [self._rank, self._rank]])
        return replace(self._trace, ranks=(*ranks, *made))


MUTATIONS: tuple[Callable[[Mutator], Trace | None], ...] = (
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
