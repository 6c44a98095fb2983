"""The allocator's book: allocations and frees in host issue order.

Memory is booked when the host issues `Allocate` and returned when it issues `Free`, as in PyTorch.
Only a deferred free depends on time: `book` asks its caller whether the uses are over, and without
an answer assumes the worst that the schedule allows. Blocks are exactly as large as their buffers:
rounding and fragmentation are for `zsim.memory.caching`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from zsim.schedule.issue_order import NO_OVERFLOW, SETUP, issued
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    SetScalar,
)
from zsim.schedule.schedule import Buffer, Program
from zsim.trace.trace import BookEntry


class Returns(Protocol):
    """Whether the uses of a deferred free are over when the host issues an `Allocate`."""

    def issue(self, step: int, operation: Operation) -> None:
        """The host issues `operation`."""
        ...

    def over(self, step: int, free: Free) -> bool:
        """Whether the uses of `free`, issued in `step`, have finished by now."""
        ...


def book(
    program: Program,
    steps: int,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
    returns: Returns | None = None,
) -> tuple[BookEntry, ...]:
    """The book of one rank that runs setup and `steps` steps of `program`.

    `returns` says when deferred frees give their memory back; without it they do as late as the
    schedule allows: when the host has waited for something that comes after the uses.
    """
    entries: list[BookEntry] = []
    pending: list[tuple[int, Free]] = []
    by_name = program.by_name
    judge: Returns | None = None
    if any(isinstance(op, Free) and op.mode is FreeMode.DEFERRED for op in program.by_id.values()):
        judge = WorstCase() if returns is None else returns
    worst = judge if isinstance(judge, WorstCase) else None
    asked, known = 0, -1  # how many are pending of which the answer is as it was
    for step, operation in issued(program, steps, overflow_steps):
        if judge is not None:
            judge.issue(step, operation)
            if isinstance(operation, Allocate) and pending:
                begin = asked if worst is not None and worst.known == known else 0
                entries += _return(pending, begin, judge, program, at=(step, operation))
                asked, known = len(pending), -1 if worst is None else worst.known
            if isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED:
                pending.append((step, operation))
                continue
        if isinstance(operation, Allocate):
            buffer = by_name[operation.buffer]
            entries.append(entry_of(operation.id, step, buffer, buffer.size_bytes))
        elif isinstance(operation, Free):
            buffer = by_name[operation.buffer]
            entries.append(entry_of(operation.id, step, buffer, -buffer.size_bytes))
    return tuple(entries)


def _return(
    pending: list[tuple[int, Free]],
    begin: int,
    judge: Returns,
    program: Program,
    *,
    at: tuple[int, Allocate],
) -> Iterator[BookEntry]:
    """Book back at an allocation what is over from `begin` on, and keep the rest in `pending`."""
    step, allocate = at
    still: list[tuple[int, Free]] = pending[:begin]
    for when, free in pending[begin:]:
        if judge.over(when, free):
            buffer = program.by_name[free.buffer]
            yield entry_of(allocate.id, step, buffer, -buffer.size_bytes)
        else:
            still.append((when, free))
    pending[:] = still


def entry_of(operation: str, step: int, buffer: Buffer, change_bytes: int) -> BookEntry:
    """Return a line of the book."""
    return BookEntry(
        operation=operation,
        step=step,
        pool=buffer.pool,
        buffer=buffer.name,
        kind=buffer.kind,
        change_bytes=change_bytes,
    )


class AtOnce:
    """Deferred frees return at the next allocation: the host waits for their uses before it."""

    def issue(self, step: int, operation: Operation) -> None:
        """The host issues `operation`."""

    def over(self, step: int, free: Free) -> bool:
        """Return that the uses are over."""
        del step, free
        return True


class WorstCase:
    """Deferred frees return only when the host is sure: it waited for something after the uses.

    Streams are chains, so "operation X has finished" is one position per stream (a vector clock).
    Answers about what is pending change only when `known` does.
    """

    def __init__(self) -> None:
        self.known = 0
        self._count: dict[str, int] = {}
        self._clock: dict[str, Mapping[str, int]] = {}
        self._tail: dict[str, Mapping[str, int]] = {}
        self._host: dict[str, int] = {}
        self._uses: dict[tuple[int, str], list[Mapping[str, int]]] = {}
        self._step = SETUP

    def issue(self, step: int, operation: Operation) -> None:
        """The host issues `operation`: it gets a place on its stream, or moves the host on."""
        if self._step == SETUP != step:  # setup ends with all streams drained
            self._learn(dict(self._count))
        self._step = step
        match operation:
            case Allocate() | SetScalar():
                pass
            case HostWait(operation=edge):
                self._learn(_later([self._host, *self._clocks((edge,))]))
            case Branch(after=after):
                self._learn(_later([self._host, *self._clocks(after)]))
            case Free(mode=FreeMode.HOST, uses=uses):
                self._learn(_later([self._host, *self._clocks(uses)]))
            case Free(uses=uses):
                self._uses[step, operation.id] = list(self._clocks(uses))
            case _:
                stream = operation.stream
                count = self._count[stream] = self._count.get(stream, 0) + 1
                before = self._tail.get(stream, {})
                clock = _later([before, self._host, *self._clocks(operation.after)])
                clock[stream] = count
                self._clock[operation.id] = self._tail[stream] = clock

    def _learn(self, host: dict[str, int]) -> None:
        """The host knows more."""
        self._host = host
        self.known += 1

    def over(self, step: int, free: Free) -> bool:
        """Whether the host has waited for something that comes after every use of `free`."""
        return all(
            self._host.get(stream, 0) >= place
            for clock in self._uses[step, free.id]
            for stream, place in clock.items()
        )

    def _clocks(self, edges: Iterable[Edge]) -> Iterator[Mapping[str, int]]:
        for edge in edges:
            name = edge.operation if isinstance(edge, Previous) else edge
            if name in self._clock:
                yield self._clock[name]


def _later(clocks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for clock in clocks:
        for stream, place in clock.items():
            if place > latest.get(stream, 0):
                latest[stream] = place
    return latest
