"""The ledger of memory: allocations and frees in host issue order.

An entry is made when the host issues `Allocate` or `Free`, as in PyTorch. Only deferred frees
depend on time: `memory_ledger` asks its caller when their uses have finished, and without a caller
assumes the worst case that the schedule allows. Blocks are exactly as large as their buffers;
rounding and fragmentation are modeled in `zsim.memory.caching`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Protocol
from weakref import finalize

from zsim.schedule.issue_order import NO_OVERFLOW, SETUP, issued, issued_lists
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    ReadCounts,
    SetScalar,
)
from zsim.schedule.schedule import Buffer, Kind, Program
from zsim.trace.trace import LedgerEntry


class Returns(Protocol):
    """When the uses of deferred frees have finished, on the clock of the issuing host."""

    def issue(self, step: int, operation: Operation) -> None:
        """Record that the host issues `operation`."""
        ...

    @property
    def now(self) -> int:
        """Return the time of the host; it never decreases."""
        ...

    def over_at(self, step: int, free: Free) -> int:
        """Return the time at which the uses of `free`, issued in `step`, have finished."""
        ...


def memory_ledger(
    program: Program,
    steps: int,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
    returns: "Returns | WorstCase | None" = None,
) -> tuple[LedgerEntry, ...]:
    """Return the ledger of one rank that runs setup and `steps` steps of `program`.

    `returns` sets when deferred frees return their memory. Without it, they return as late as the
    schedule allows: when the host has waited for an operation after the uses. That ledger, and that
    of `AtOnce`, is cached while `program` is alive; fewer steps are a prefix of it.
    """
    if overflow_steps or not (returns is None or isinstance(returns, AtOnce)):
        return _made(program, steps, overflow_steps, returns)
    kept, key = _LATEST if returns is None else _EARLIEST, id(program)
    known = kept.get(key)
    if known is None:
        finalize(program, kept.pop, key, None).atexit = False
    if known is None or known[0] < steps:
        known = kept[key] = steps, _made(program, steps, overflow_steps, returns)
    if known[0] == steps:
        return known[1]
    return known[1][: bisect_left(known[1], steps, key=lambda entry: entry.step)]


_LATEST: dict[int, tuple[int, tuple[LedgerEntry, ...]]] = {}
"""Steps and ledger of live programs by identity, with deferred frees as late as possible."""

_EARLIEST: dict[int, tuple[int, tuple[LedgerEntry, ...]]] = {}
"""Steps and ledger of live programs, with deferred frees at the next allocation."""


def _made(
    program: Program,
    steps: int,
    overflow_steps: frozenset[int],
    returns: "Returns | WorstCase | None",
) -> tuple[LedgerEntry, ...]:
    if not program.defers:
        return _made_at_once(program, steps, overflow_steps)
    entries: list[LedgerEntry] = []
    by_name = program.by_name
    sizes = {name: buffer.size_bytes for name, buffer in by_name.items()}
    judge = WorstCase() if returns is None else returns
    pending = _UntilHostWaited(judge) if isinstance(judge, WorstCase) else _UntilTime(judge)
    for step, operation in issued(program, steps, overflow_steps):
        judge.issue(step, operation)
        if type(operation) is Allocate:
            for free in pending.returned():
                name = free.buffer
                entries.append(entry_of(operation.id, step, by_name[name], -sizes[name]))
            name = operation.buffer
            entries.append(entry_of(operation.id, step, by_name[name], sizes[name]))
        elif type(operation) is Free:
            name = operation.buffer
            if operation.mode is FreeMode.DEFERRED:
                pending.add(step, operation)
            else:
                entries.append(entry_of(operation.id, step, by_name[name], -sizes[name]))
    return tuple(entries)


def _made_at_once(
    program: Program, steps: int, overflow_steps: frozenset[int]
) -> tuple[LedgerEntry, ...]:
    """Return the ledger of a program without deferred frees."""
    taken: dict[str, tuple[str, Kind, int]] = {}
    given: dict[str, tuple[str, Kind, int]] = {}
    for name, buffer in program.by_name.items():
        size = buffer.size_bytes
        taken[name], given[name] = (
            (buffer.pool, buffer.kind, size),
            (buffer.pool, buffer.kind, -size),
        )
    entries: list[LedgerEntry] = []
    known: Iterable[Operation] = ()
    lines: list[tuple[str, str, str, Kind, int]] = []  # of the latest step
    for step, operations in issued_lists(program, steps, overflow_steps):
        if operations is not known:
            known, lines = operations, []
            for operation in operations:
                if type(operation) is Allocate:
                    lines.append((operation.id, operation.buffer, *taken[operation.buffer]))
                elif type(operation) is Free:
                    lines.append((operation.id, operation.buffer, *given[operation.buffer]))
        entries += [
            LedgerEntry(
                operation=name,
                step=step,
                pool=pool,
                buffer=buffer,
                kind=kind,
                change_bytes=change,
            )
            for name, buffer, pool, kind, change in lines
        ]
    return tuple(entries)


def entry_of(operation: str, step: int, buffer: Buffer, change_bytes: int) -> LedgerEntry:
    """Return one entry of the ledger."""
    return LedgerEntry(
        operation=operation,
        step=step,
        pool=buffer.pool,
        buffer=buffer.name,
        kind=buffer.kind,
        change_bytes=change_bytes,
    )


class AtOnce:
    """Deferred frees return at the next allocation: the host waits for their uses before it."""

    now = 0

    def issue(self, step: int, operation: Operation) -> None:
        """Record that the host issues `operation`."""

    def over_at(self, step: int, free: Free) -> int:
        """Return the current time: uses have always finished."""
        del step, free
        return self.now


class WorstCase:
    """Deferred frees return only once the host has waited for an operation after the uses.

    Streams are chains, so "operation X has finished" is one position per stream (a vector clock).
    """

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._clock: dict[str, Mapping[str, int]] = {}
        self._tail: dict[str, Mapping[str, int]] = {}
        self._knows_of: dict[str, Mapping[str, int]] = {}
        self._host: dict[str, int] = {}
        self._uses: dict[tuple[int, str], list[Mapping[str, int]]] = {}
        self._step = SETUP

    def issue(self, step: int, operation: Operation) -> None:
        """Record that the host issues `operation`, on a stream or on the host."""
        if self._step == SETUP != step:  # setup ends with all streams drained
            self._host = dict(self._count)
        self._step = step
        match operation:
            case Allocate() | SetScalar():
                pass
            case HostWait(operation=edge) | ReadCounts(operation=edge):
                self._host = _later([self._host, *self._clocks((edge,))])
            case Branch(after=after):
                self._host = _later([self._host, *self._clocks(after)])
            case Free(mode=FreeMode.HOST, uses=uses):
                self._host = _later([self._host, *self._clocks(uses)])
            case Free(uses=uses):
                self._uses[step, operation.id] = list(self._clocks(uses))
            case _:
                stream = operation.stream
                count = self._count[stream] = self._count.get(stream, 0) + 1
                before = self._tail.get(stream, {})
                if operation.after or self._knows_of.get(stream) is not self._host:
                    clock = _later([before, self._host, *self._clocks(operation.after)])
                    self._knows_of[stream] = self._host
                else:  # the host has waited for nothing since
                    clock = dict(before)
                clock[stream] = count
                self._clock[operation.id] = self._tail[stream] = clock

    def over(self, step: int, free: Free) -> bool:
        """Return True if the host has waited for an operation after every use of `free`."""
        return self.missing(step, free) is None

    def missing(self, step: int, free: Free) -> tuple[str, int] | None:
        """Return a (stream, position) that a use of `free` still needs, or None."""
        for clock in self._uses[step, free.id]:
            for stream, position in clock.items():
                if self.reached(stream) < position:
                    return stream, position
        return None

    def reached(self, stream: str) -> int:
        """Return the position on `stream` up to which the host has waited."""
        return self._host.get(stream, 0)

    def _clocks(self, edges: Iterable[Edge]) -> Iterator[Mapping[str, int]]:
        for edge in edges:
            name = edge.operation if isinstance(edge, Previous) else edge
            if name in self._clock:
                yield self._clock[name]


class _UntilTime:
    """Deferred frees, each returned when the time at which its uses end has passed."""

    def __init__(self, judge: Returns) -> None:
        self._judge = judge
        self._frees: list[Free] = []
        self._waiting: list[tuple[int, int]] = []

    def add(self, step: int, free: Free) -> None:
        """Add a free that the host issues in `step`."""
        heappush(self._waiting, (self._judge.over_at(step, free), len(self._frees)))
        self._frees.append(free)

    def returned(self) -> list[Free]:
        """Remove and return the frees whose uses have finished by now, in issue order."""
        waiting, now = self._waiting, self._judge.now
        found: list[int] = []
        while waiting and waiting[0][0] <= now:
            found.append(heappop(waiting)[1])
        return [self._frees[number] for number in sorted(found)]


class _UntilHostWaited:
    """Deferred frees that return once the host has waited for an operation after their uses.

    Each is listed under one stream position that it still needs, and is checked again only when the
    host has reached that position. Checking all of them at every allocation takes quadratic time.
    """

    def __init__(self, judge: WorstCase) -> None:
        self._judge = judge
        self._frees: list[tuple[int, Free]] = []
        self._lacking: dict[str, list[tuple[int, int]]] = {}
        self._over: list[int] = []

    def add(self, step: int, free: Free) -> None:
        """Add a free that the host issues in `step`."""
        self._frees.append((step, free))
        self._check(len(self._frees) - 1)

    def _check(self, number: int) -> None:
        missing = self._judge.missing(*self._frees[number])
        if missing is None:
            self._over.append(number)
        else:
            stream, position = missing
            heappush(self._lacking.setdefault(stream, []), (position, number))

    def returned(self) -> list[Free]:
        """Remove and return the frees whose uses have finished, in issue order."""
        for stream, lacking in tuple(self._lacking.items()):
            reached = self._judge.reached(stream)
            while lacking and lacking[0][0] <= reached:
                self._check(heappop(lacking)[1])
        found, self._over = sorted(self._over), []
        return [self._frees[number][1] for number in found]


def _later(clocks: Iterable[Mapping[str, int]]) -> dict[str, int]:
    latest: dict[str, int] = {}
    for clock in clocks:
        for stream, place in clock.items():
            if place > latest.get(stream, 0):
                latest[stream] = place
    return latest
