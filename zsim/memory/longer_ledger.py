"""Memory of a pipeline step with more micro-batches, from the ledger of one with few of them.

In the steady state a stage frees as much as it allocates in a turn of micro-batches, so more turns
allocate no more. Where the caching allocator puts a later turn may differ, though. So further turns
are served by the same allocator, in the slots of their micro-batches, until it looks as it did at
the end of an earlier one: then it repeats what it did since.
"""

import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msgspec.structs import replace as changed

from zsim.memory.reserved import allocator_of
from zsim.memory.service import Service
from zsim.schedule.schedule import Discipline, Place, Pool, Program
from zsim.trace.trace import LedgerEntry, Reservation

MICRO_BATCH = re.compile(r"/mb(\d+)")
SLOT = re.compile(r"@(\d+)|/(\d+)$")

ENTRIES_MAX = 30_000
"""Maximum entries of further turns that are served in a step of one rank, in about 0.1 s."""

NEAR = 0.95
"""Fraction of the largest rank's reserved bytes from which a rank may become the largest."""


class UnsteadyMemoryError(Exception):
    """More micro-batches need more memory, or another: the message says why."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An entry without numbers of micro-batch and slot, and these numbers."""

    kind: tuple[str, int]
    batch: int | None
    base: str
    slot: int


@dataclass(frozen=True, slots=True)
class _Turn:
    """The last turn of a step that repeats the one before; `since` is the first line repeated."""

    since: int
    begin: int
    end: int


def longer_reservations(
    program: Program,
    pools: Sequence[Pool],
    entries: Sequence[LedgerEntry],
    known: Sequence[Reservation],
    *,
    micro_batches: int,
    turn: int,
    times: int,
    largest_bytes: int = 0,
) -> tuple[Reservation, ...]:
    """Return the reservations of a rank whose steps have `times` more turns of micro-batches.

    `entries` and `known` are its ledger and reservations with `micro_batches`. If turns are too
    long to serve all, none is served for ranks that reserve much less than `largest_bytes`.

    Raises:
        UnsteadyMemoryError: its memory does not repeat from turn to turn, or it waits for memory.
    """
    if program.defers:
        raise UnsteadyMemoryError("frees are deferred")
    if any(each.waits for each in known):
        raise UnsteadyMemoryError("a host waits for memory")
    known_lines: dict[str, _Line] = {}  # steps repeat the operations of the first one
    lines = [
        known_lines.get(each.operation) or known_lines.setdefault(each.operation, _line(each))
        for each in entries
    ]
    steps = list(_steps(entries))
    turns = [_last_turn(lines, each, micro_batches, turn) for each in steps]
    longer = _Longer(program, entries, lines, steps, turns, turn, times, largest_bytes)
    longer.need_rotation()
    return tuple(longer.reservation(pool, each) for pool, each in zip(pools, known, strict=True))


def _line(entry: LedgerEntry) -> _Line:
    match = MICRO_BATCH.search(entry.operation)
    base, slot = _base(entry.buffer)
    if match is None:
        return _Line((entry.operation, entry.change_bytes), None, base, slot)
    name = entry.operation[: match.start()] + entry.operation[match.end() :]
    kind = (SLOT.sub("", name), entry.change_bytes)
    return _Line(kind, int(match[1]), base, slot)


def _base(buffer: str) -> tuple[str, int]:
    """Return the name of a buffer with a mark in place of its slot, and the slot."""
    match = SLOT.search(buffer)
    if match is None:
        return buffer, 0
    return buffer[: match.start()] + buffer[match.end() :], int(match[1] or match[2])


def _steps(entries: Sequence[LedgerEntry]) -> Iterator[tuple[int, int]]:
    """Yield the first line of each step in the ledger and the line after it, without setup."""
    begin = 0
    for at in range(1, len(entries) + 1):
        if at == len(entries) or entries[at].step != entries[begin].step:
            if entries[begin].step >= 0:
                yield begin, at
            begin = at


def _last_turn(
    lines: Sequence[_Line], step: tuple[int, int], micro_batches: int, turn: int
) -> _Turn:
    """Return the last turn that repeats the lines of the turn before.

    Raises:
        UnsteadyMemoryError: there is none.
    """
    begin, end = step
    places: dict[int | None, int] = {}
    for place in range(begin, end):
        places.setdefault(lines[place].batch, place)
    first, second = places.get(micro_batches - 1 - turn), places.get(micro_batches - 1)
    if first is None or second is None:
        raise UnsteadyMemoryError("a stage allocates nothing for a micro-batch")
    length, since, at = second - first, first, first
    while since > begin and _is_next(lines[since - 1], lines[since - 1 + length], turn):
        since -= 1
    while at + length < end and _is_next(lines[at], lines[at + length], turn):
        at += 1
    if at == since:
        raise UnsteadyMemoryError("no turn repeats the one before")
    return _Turn(since, at, at + length)


def _is_next(line: _Line, later: _Line, turn: int) -> bool:
    if line.kind != later.kind or line.batch is None or later.batch is None:
        return False
    return later.batch - line.batch == turn


@dataclass(frozen=True)
class _Longer:
    """The ledger of a rank, with the turns to repeat in each step."""

    program: Program
    entries: Sequence[LedgerEntry]
    lines: Sequence[_Line]
    steps: Sequence[tuple[int, int]]
    turns: Sequence[_Turn]
    turn: int
    times: int
    largest_bytes: int

    @cached_property
    def slots(self) -> dict[str, dict[int, str]]:
        """Return the names of the buffers in the slots of each base."""
        found: dict[str, dict[int, str]] = {}
        for buffer in self.program.buffers:
            base, slot = _base(buffer.name)
            found.setdefault(base, {})[slot] = buffer.name
        return found

    def need_rotation(self) -> None:
        """Raise UnsteadyMemoryError unless each turn uses the slots that follow the last turn.

        Raises:
            UnsteadyMemoryError: it uses others.
        """
        for each in self.turns:
            length = each.end - each.begin
            for at in range(each.since, each.begin):
                line, later = self.lines[at], self.lines[at + length]
                if later.slot != (line.slot + self.turn) % len(self.slots[line.base]):
                    raise UnsteadyMemoryError("micro-batches do not take turns in slots")

    def reservation(self, pool: Pool, known: Reservation) -> Reservation:
        """Return the reservation of a pool in the longer steps.

        Raises:
            UnsteadyMemoryError: a turn changes what is allocated, or is refused.
        """
        own = [each.pool == pool.name for each in self.entries]
        for each in self.turns:
            span = range(each.begin, each.end)
            if sum(self.entries[at].change_bytes for at in span if own[at]):
                raise UnsteadyMemoryError("a turn frees more or less than it allocates")
        if pool.discipline is Discipline.EXACT or pool.place is not Place.DEVICE:
            return known
        served = max(self.times * (each.end - each.begin) for each in self.turns)
        if served > ENTRIES_MAX and known.peak_bytes < NEAR * self.largest_bytes:
            return known
        service = Service(allocator_of(pool, known.capacity_bytes), self.program, pool.name)
        at = 0
        for (_, end), each in zip(self.steps, self.turns, strict=True):
            self._serve(service, range(at, each.end), 0)
            shift = self._serve_turns(service, each)
            self._serve(service, range(each.end, end), shift)
            at = end
        peak = service.peak_reserved_bytes
        return replace(known, course_bytes=(peak,), needed_bytes=service.allocated_bytes)

    def _serve_turns(self, service: Service, turn: _Turn) -> int:
        """Serve further turns of a step until the allocator repeats; return their number.

        Raises:
            UnsteadyMemoryError: the allocator refuses one.
        """
        span = range(turn.begin, turn.end)
        seen = {self._layout(service, 0): 0}
        left = min(self.times, max(1, ENTRIES_MAX // len(span)))
        shift = 0
        while left:
            shift, left = shift + 1, left - 1
            self._serve(service, span, shift)
            before = seen.setdefault(self._layout(service, shift), shift)
            if before != shift:  # after whole rounds it looks like this again
                left = (self.times - shift) % (shift - before)
                seen.clear()
        return shift

    def _layout(self, service: Service, shift: int) -> Hashable:
        """Return the blocks of a pool, with slots counted from the latest turn."""

        def label(name: str) -> Hashable:
            base, slot = _base(name)
            return base, (slot - shift * self.turn) % len(self.slots[base])

        return service.layout(label)

    def _serve(self, service: Service, span: range, shift: int) -> None:
        """Serve lines in the slots of `shift` turns later.

        Raises:
            UnsteadyMemoryError: the allocator refuses one.
        """
        entries = [self._shifted(at, shift) if shift else self.entries[at] for at in span]
        service.course(entries)
        if service.refused_bytes:
            raise UnsteadyMemoryError("more micro-batches run out of memory")

    def _shifted(self, at: int, shift: int) -> LedgerEntry:
        line, entry = self.lines[at], self.entries[at]
        names = self.slots[line.base]
        slot = (line.slot + shift * self.turn) % len(names)
        return entry if slot == line.slot else changed(entry, buffer=names[slot])
