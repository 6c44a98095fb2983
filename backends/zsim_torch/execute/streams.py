"""Order operations on one rank: streams, edges and waits of the host.

Streams that are host threads or I/O handles run on threads (`HostWorkers`). `CpuStreams` runs the
operations of other streams on the host at once, except collectives. A collective is issued and
stays in flight; the first operation that is ordered after it waits. Two collectives in a row need
no wait between them unless their views overlap: the process group keeps their order.
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
    """A check whether operations have finished, called by deferred frees."""

    def __call__(self) -> bool:
        """Return True if they have finished."""
        ...


class Streams(Protocol):
    """The interface of streams that an executor uses."""

    step: int

    workers: HostWorkers

    keeps_trace: bool
    """Whether to record the times of operations for `events`."""

    def compute(
        self,
        entry: StreamEntry,
        action: Callable[[], None],
        awaited: Sequence[Awaitable] = (),
    ) -> None:
        """Run `action` in order on its stream, after the operations in `awaited`."""
        ...

    def communicate(self, entry: StreamEntry, issue: Callable[[], list[PendingWork]]) -> None:
        """Issue a collective in order on its stream."""
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
        """Make the stream `home` wait for `uses`, then drop the buffer's memory.

        Returns the operations that must finish before memory that was `lent` is reused.
        """
        ...

    def host_waits(self, edges: Iterable[Edge]) -> None:
        """Block the host until the operations have finished."""
        ...

    def finish(self, home: str, buffer: str, uses: Iterable[Edge]) -> Completion:
        """Return a function that is True once `uses` and the work of `home` have finished."""
        ...

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Return a context manager that makes `stream` current."""
        ...

    def drain(self) -> None:
        """Block the host until all issued operations have finished."""
        ...

    def end_step(self) -> None:
        """End the step: `Previous` edges now refer to its operations."""
        ...

    def events(self, origin: int) -> list[Event]:
        """Return the events in picoseconds since `origin`, a value of `now`; call after `drain`."""
        ...

    def forget(self) -> None:
        """Forget the events of finished operations."""
        ...

    def follow_caller(self) -> None:
        """Order every stream after the caller's earlier operations on its own stream."""
        ...

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make `tensors` readable on the caller's stream, after the operations issued here."""
        ...

    def now(self) -> int:
        """Return the clock in the unit of the `origin` of `events`."""
        ...


class _Span(NamedTuple):
    operation: str
    step: int
    stream: str
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class CpuStreams:
    """Streams of a rank on CPU. A collective ends when the host has waited for it."""

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
        """Wait for dependencies, then run `action` on the host; or pass it to a thread.

        A thread cannot wait for a collective, because Gloo divides for an average in the waiting
        call.
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
        """Issue the collective; first wait for earlier collectives that touch the same elements."""
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
        """Wait on the host for `uses` and free the memory; or let a thread do both."""
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
        """Wait for the named operations and their predecessors."""
        edges = tuple(edges)
        if self._flying.alive:
            self._land(self._flying.named(edges))
        if self.workers.exist:
            self.workers.wait(self.workers.named(edges))

    def finish(self, home: str, buffer: str, uses: Iterable[Edge]) -> Completion:
        """Return a function that is True once the host has seen all of them finish."""
        uses = tuple(uses)
        users = self._flying.users(home, buffer, uses)
        jobs = [*self.workers.named(uses), *self.workers.last(home)]
        return lambda: (
            all(flight.end_ns is not None for flight in users)
            and all(job.is_over() for job in jobs)
        )

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Return a no-op context manager."""
        return nullcontext()

    def drain(self) -> None:
        """Wait for every collective in flight and every thread."""
        self._land(self._flying)
        self.workers.drain()

    def end_step(self) -> None:
        """Wait for every collective in flight, but not for threads."""
        self._land(self._flying)
        self.workers.end_step()

    def events(self, origin: int) -> list[Event]:
        """Return all events of the trace; per stream in the order in which they ended."""
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
        """Forget the events of finished operations."""
        self.workers.forget()
        self._spans.clear()

    def follow_caller(self) -> None:
        """Do nothing: the caller is this thread."""

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: the tensors are already computed."""

    def now(self) -> int:
        """Return nanoseconds of a clock that all processes of this machine share."""
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
