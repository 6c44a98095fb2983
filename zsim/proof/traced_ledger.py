"""The allocator log of a traced rank: the lines that its program allows, for what it ran.

Allocations and frees are logged as the host issues them. A deferred free returns memory at any
later allocation, but not before its uses have ended, and no later than after a wait of the host
for an operation that follows them. Lines without bytes are skipped, since they do not show whether
they allocate or free.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import groupby

from zsim.memory.ledger import WorstCase
from zsim.proof.sequence_diff import Item
from zsim.proof.traced_rank import Instance, TracedRank
from zsim.schedule.operation import Allocate, Free, FreeMode, StreamOperation
from zsim.schedule.schedule import Kind
from zsim.trace.trace import LedgerEntry

Key = tuple[int, str, str, bool]
"""Step, operation, buffer, and whether memory returns."""


Line = tuple[Key, tuple[str, Kind, int]]
"""A key, with its pool, kind and bytes."""


@dataclass(frozen=True, slots=True)
class TooEarly:
    """A deferred free that returned memory at an allocation before `use` had ended."""

    key: Key
    free: Instance
    use: Instance


class TracedLedger:
    """Lines that the allocator log of `rank` should have, and frees that returned too early."""

    def __init__(self, rank: TracedRank) -> None:
        self._lines: list[Line] = []
        self.too_early: list[TooEarly] = []
        self._rank = rank
        self._returned = Counter(_key(each) for each in rank.trace.book if each.change_bytes < 0)
        self._pending: list[tuple[int, Free]] = []
        self._judge = WorstCase() if _defers(rank) else None
        self._issued_by_ps = self._first_starts() if self._judge is not None else []
        for place, (step, operation) in enumerate(rank.issued):
            if self._judge is not None:
                self._judge.issue(step, operation)
            if isinstance(operation, Allocate):
                self._come_back(place, step, operation)
                self._add_line(step, operation.id, operation.buffer, frees=False)
            elif isinstance(operation, Free):
                if operation.mode is FreeMode.DEFERRED:
                    self._pending.append((step, operation))
                else:
                    self._add_line(step, operation.id, operation.buffer, frees=True)
        self.expected = _in_order(self._lines)

    def _add_line(self, step: int, operation: str, buffer: str, *, frees: bool) -> Key:
        of = self._rank.program.by_name[buffer]
        key = (step, operation, buffer, frees)
        if of.size_bytes:
            self._lines.append((key, (of.pool, of.kind, of.size_bytes)))
        return key

    def _come_back(self, place: int, step: int, allocate: Allocate) -> None:
        """Log deferred frees: where the trace has them, at the latest once their uses have ended.

        Several frees of one buffer return in order.
        """
        still: list[tuple[int, Free]] = []
        counted: Counter[str] = Counter()
        for when, free in self._pending:
            assert self._judge is not None
            counted[free.buffer] += 1
            key = (step, allocate.id, free.buffer, True)
            said_so = counted[free.buffer] <= self._returned[key]
            if not said_so and not self._judge.over(when, free):
                still.append((when, free))
                continue
            key = self._add_line(step, allocate.id, free.buffer, frees=True)
            for use in free.uses if said_so else ():
                event = self._rank.events.get((when, use))
                if event is not None and event.end_ps > self._issued_by_ps[place]:
                    self.too_early.append(TooEarly(key, (when, free.id), (when, use)))
        self._pending = still

    def _first_starts(self) -> list[int]:
        """Return, by place, an upper bound of its issue time: the start of a later operation."""
        found = [0] * len(self._rank.issued)
        first = max((event.end_ps for event in self._rank.trace.events), default=0)
        for place in range(len(found) - 1, -1, -1):
            step, operation = self._rank.issued[place]
            if isinstance(operation, StreamOperation):
                event = self._rank.events.get((step, operation.id))
                first = first if event is None else min(first, event.start_ps)
            found[place] = first
        return found


def found(entries: tuple[LedgerEntry, ...]) -> list[Item]:
    """Return the log of a trace, in the form of `expected`."""
    return _in_order(
        [
            (_key(each), (each.pool, each.kind, abs(each.change_bytes)))
            for each in entries
            if each.change_bytes
        ]
    )


def _in_order(lines: list[Line]) -> list[Item]:
    """Return lines with the frees at one allocation sorted by name.

    The order in which uses of freed buffers end is not determined.
    """
    made: list[Item] = []
    for _, together in groupby(lines, key=lambda line: line[0][:2]):
        ordered: list[Line] = sorted(together, key=_place)
        made += ordered
    return made


def _place(line: Line) -> tuple[bool, str]:
    (_, _, buffer, frees), _ = line
    return not frees, buffer if frees else ""


def freed_at(entries: tuple[LedgerEntry, ...]) -> dict[tuple[int, str, str], Instance]:
    """Return the operation that frees each allocation, by step, `Allocate` and buffer."""
    alive: defaultdict[str, deque[Instance]] = defaultdict(deque)
    freed: dict[tuple[int, str, str], Instance] = {}
    for entry in entries:
        if entry.change_bytes > 0:
            alive[entry.buffer].append((entry.step, entry.operation))
        elif entry.change_bytes < 0 and alive[entry.buffer]:
            step, allocate = alive[entry.buffer].popleft()
            freed[step, allocate, entry.buffer] = entry.step, entry.operation
    return freed


def _key(entry: LedgerEntry) -> Key:
    return entry.step, entry.operation, entry.buffer, entry.change_bytes < 0


def _defers(rank: TracedRank) -> bool:
    return any(
        isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED
        for operation in rank.program.by_id.values()
    )
