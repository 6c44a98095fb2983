"""Order of operations on one rank: streams, edges, and waits of the host.

Streams that are threads of the host or I/O handles run on threads (`HostWorkers`). Of the others
`CpuStreams` runs everything but collectives at once, on the host. A collective is handed over and
flies; the first operation that is ordered after it waits. Two collectives in a row need no wait
between them unless their views overlap: the group keeps their order.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from zsim.schedule.operation import Edge
from zsim.trace.trace import Event
from zsim_torch.execute.flights import Flight, Flights, PendingWork, StreamEntry, closure
from zsim_torch.execute.host_workers import PS_PER_NS, Awaitable, HostWorkers
from zsim_torch.supervise.progress_record import handed_over, waiting_for


class Completion(Protocol):
    """Something that will have finished; asked by deferred frees."""

    def __call__(self) -> bool:
        """Return whether it has."""
        ...


class Streams(Protocol):
    """The interface of streams that an executor needs."""

    step: int

    workers: HostWorkers

    keeps_trace: bool
    """Keep when operations ran, for `events`."""

    def compute(
        self,
        entry: StreamEntry,
        action: Callable[[], None],
        awaited: Sequence[Awaitable] = (),
    ) -> None:
        """Run `action` in order on its stream, and after `awaited`."""
        ...

    def communicate(self, entry: StreamEntry, issue: Callable[[], list[PendingWork]]) -> None:
        """Hand a collective over in order on its stream."""
        ...

    def home_waits(
        self,
        home: str,
        buffer: str,
        uses: Iterable[Edge],
        drop: Callable[[], None],
        *,
        lent: bool = True,
    ) -> Sequence[Awaitable]:
        """Make the stream `home` wait for `uses` and drop the buffer's memory.

        Returns what has to be over before memory that was `lent` is somebody else's.
        """
        ...

    def host_waits(self, edges: Iterable[Edge]) -> None:
        """Block the host until the operations have finished."""
        ...

    def finish(self, home: str, buffer: str, uses: Iterable[Edge]) -> Completion:
        """Return whether `uses`, and what `home` does with the buffer, have finished.

        Asked later.
        """
        ...

    def on(self, stream: str) -> AbstractContextManager[None]:
        """`stream` is current inside."""
        ...

    def drain(self) -> None:
        """Everything issued has finished."""
        ...

    def end_step(self) -> None:
        """End the step: what ran in it is from now on a previous instance."""
        ...

    def events(self, origin: int) -> list[Event]:
        """Return what ran and when, in picoseconds since `origin` of `now`; after a drain."""
        ...

    def forget(self) -> None:
        """Forget what ran and has ended: `events` has it no more."""
        ...

    def follow_caller(self) -> None:
        """Order every stream after what the caller has issued on its own stream."""
        ...

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the caller read `tensors` on its own stream, after what was issued here."""
        ...

    def now(self) -> int:
        """Return the clock, in a unit that `events` understands."""
        ...


class _Span(NamedTuple):
    operation: str
    step: int
    stream: str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class CpuStreams:
    """Streams of a rank on CPU. The end of a collective is when the host learnt of it."""

    workers: HostWorkers = field(default_factory=HostWorkers)
    step: int = -1
    keeps_trace: bool = True
    _flying: Flights = field(default_factory=Flights)
    _spans: list[_Span] = field(default_factory=list[_Span])
    _number: int = 0
    _handed: Counter[str] = field(default_factory=Counter[str])

    def compute(
        self,
        entry: StreamEntry,
        action: Callable[[], None],
        awaited: Sequence[Awaitable] = (),
    ) -> None:
        """Wait for what is ordered before, then run `action` on the host; or hand it to a thread.

        A thread cannot wait for a collective: Gloo divides for an average where somebody waits.
        """
        if self._flying.alive and (before := self._flying.before(entry)):
            self._land(before)
        if self.workers.exist:
            if self.workers.takes(entry, self.step, action, awaited):
                return
            self.workers.wait([*self.workers.named(entry.after), *awaited])
        if not self.keeps_trace:
            action()
            return
        start = time.perf_counter_ns()
        action()
        self._note(entry, start, time.perf_counter_ns())

    def communicate(self, entry: StreamEntry, issue: Callable[[], list[PendingWork]]) -> None:
        """Hand the collective over; wait first for flights before it that touch what it touches."""
        if self.workers.exist:
            self.workers.wait(self.workers.named(entry.after))
        before = self._flying.before(entry) if self._flying.alive else []
        if before and self._flying.touch(entry):
            self._land(
                [
                    flight
                    for flight in closure(before)
                    if any(
                        one.conflicts(two) for one in flight.entry.touches for two in entry.touches
                    )
                ]
            )
        issued = time.perf_counter_ns()
        works = issue()
        self._handed[entry.group] += 1
        handed_over(entry.group_number, self._handed[entry.group])
        if not works:
            self._land(before)
            issued = max(issued, *(flight.end_ns or 0 for flight in before), 0)
            self._note(entry, issued, max(issued, time.perf_counter_ns()))
            return
        self._number += 1
        flight = Flight(
            entry, self.step, self._number, issued, works, before, self._handed[entry.group]
        )
        self._flying.add(flight)

    def home_waits(
        self,
        home: str,
        buffer: str,
        uses: Iterable[Edge],
        drop: Callable[[], None],
        *,
        lent: bool = True,
    ) -> Sequence[Awaitable]:
        """Wait on the host: it is the stream, and the memory really goes. Or let a thread wait."""
        if self._flying.alive:
            uses = tuple(uses)
            if users := self._flying.users(home, buffer, uses):
                self._land(users)
        if self.workers.exist:
            uses = tuple(uses)
            if self.workers.has(home):
                return [self.workers.hand_over("", self.step, home, drop, after=uses)]
            self.workers.wait(self.workers.named(uses))
        drop()
        return ()

    def host_waits(self, edges: Iterable[Edge]) -> None:
        """Wait for the named operations, and what was ordered before them."""
        edges = tuple(edges)
        if self._flying.alive:
            self._land(self._flying.named(edges))
        if self.workers.exist:
            self.workers.wait(self.workers.named(edges))

    def finish(self, home: str, buffer: str, uses: Iterable[Edge]) -> Completion:
        """Return whether the host has learnt that all of them ended."""
        uses = tuple(uses)
        users = self._flying.users(home, buffer, uses)
        jobs = [*self.workers.named(uses), *self.workers.last(home)]
        return lambda: (
            all(flight.end_ns is not None for flight in users)
            and all(job.is_over() for job in jobs)
        )

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def drain(self) -> None:
        """Wait for every flight, and every thread."""
        self._land(self._flying)
        self.workers.drain()

    def end_step(self) -> None:
        """Wait for every flight; the next step starts with none. Threads go on."""
        self._land(self._flying)
        self.workers.end_step()

    def events(self, origin: int) -> list[Event]:
        """Everything that ran, of each stream in the order in which it ended."""
        return [
            *self.workers.events(origin),
            *(
                Event(
                    operation=span.operation,
                    step=span.step,
                    stream=span.stream,
                    start_ps=(span.start_ns - origin) * PS_PER_NS,
                    end_ps=(span.end_ns - origin) * PS_PER_NS,
                )
                for span in self._spans
            ),
        ]

    def forget(self) -> None:
        """Forget the spans of what has ended."""
        self.workers.forget()
        self._spans.clear()

    def follow_caller(self) -> None:
        """Do nothing: the caller is this thread."""

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: they have been computed."""

    def now(self) -> int:
        """Nanoseconds of a clock that all processes of this machine share."""
        return time.perf_counter_ns()

    def _land(self, flights: Iterable[Flight]) -> None:
        for flight in closure(flights):
            entry = flight.entry
            with waiting_for(entry, 0 if entry.is_message else flight.on_group):
                for work in flight.works:
                    work.wait()
            flight.works = []
            start = max([flight.issued_ns, *(other.end_ns or 0 for other in flight.before)])
            flight.end_ns = max(start, time.perf_counter_ns())
            flight.before = []
            self._flying.remove(flight)
            if self.keeps_trace:
                span = _Span(entry.operation, flight.step, entry.stream, start, flight.end_ns)
                self._spans.append(span)

    def _note(self, entry: StreamEntry, start: int, end: int) -> None:
        if self.keeps_trace:
            self._spans.append(_Span(entry.operation, self.step, entry.stream, start, end))
