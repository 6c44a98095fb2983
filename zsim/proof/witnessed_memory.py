"""Memory of a rank as torch had it: when storages lived, and what was read and written of them.

Proved of each operation: it wrote all that it is to write and nothing else, and read nothing but
what it is to read, in the storages that its buffers have; copies and updates read all of it, put
each element where it belongs, and wrote it once. What autograd makes is told apart by the operation
that made it: that a gradient is the one of this parameter and not of another one of its unit, and
that kernels compute what they should, is not shown.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zsim.proof.finding import Finding
from zsim.proof.traced_book import freed_at
from zsim.proof.witnessed_rank import FOREVER, ByteRange, MarkedInterval, WitnessedRank, gap
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    OF_SEGMENTS,
    Action,
    Allocate,
    Branch,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Operation,
    StreamOperation,
    Together,
)
from zsim.schedule.parameter_copy import rearrangement
from zsim.trace.witness import Region, Storage

WHOLE = (Action.UPDATE, Action.UNSCALE, Action.CLIP, Action.FINITE)
"""Computations that read all elements of their operands."""

WRITERS = (*WHOLE, Action.INITIALIZE, Action.NORM)
"""Computations that write all elements of what they write, in place."""

FROM_ELSEWHERE = (
    Action.LOAD,
    Action.INITIALIZE,
    *OF_SEGMENTS,
)
"""Computations that may read what is no buffer's: data, initial values, constants of a module."""


class ByteAccess(NamedTuple):
    """A part of a buffer that an operation has to do with."""

    part: ByteRange
    reads: bool
    writes: bool


def lifetimes(rank: WitnessedRank) -> Iterator[Finding]:
    """Find memory that lived at another time than the book says, overlapped, or was too much."""
    for interval, why in rank.misses:
        yield rank.refuted(interval, why)
    freed = freed_at(rank.rank.trace.book)
    by_name = {
        (each.step, each.operation.id): each
        for each in rank.intervals
        if each.operation is not None
    }
    for number, home in rank.homes.items():
        interval = rank.intervals[number]
        assert isinstance(interval.operation, Allocate)
        buffer = interval.operation.buffer
        freed_by = freed.get((interval.step, interval.operation.id, buffer))
        expected = by_name.get(freed_by) if freed_by is not None else None
        storage = rank.witness.storages[home]
        actual = None if storage.released is None else rank.at(storage.released)
        if actual is not expected and not _dropped_late(storage, actual, expected):
            when = f"released by {actual.name}" if actual is not None else "never released"
            frees = f"{expected.name} frees it" if expected is not None else "nothing frees it"
            why = f"memory of {buffer} was {when}, {frees}"
            yield rank.refuted(actual or expected or interval, why)
    yield from _overlaps(rank)
    yield from _left(rank)
    yield from _above(rank)


def _dropped_late(
    storage: Storage, actual: MarkedInterval | None, expected: MarkedInterval | None
) -> bool:
    """Return whether a thread of torch.distributed may have kept what the rank let go in time.

    It drops what a collective was given after the collective is complete, up to a step later.
    """
    return (
        storage.by_thread
        and actual is not None
        and expected is not None
        and expected.number < actual.number
        and actual.step <= expected.step + 1
    )


def _overlaps(rank: WitnessedRank) -> Iterator[Finding]:
    """Find storages that lived at one time and have bytes in common."""
    storages = rank.witness.storages
    live: list[int] = []
    for number, one in enumerate(storages):
        made = one.made
        if made is None:  # since when it was there is not known
            continue
        live = [each for each in live if (storages[each].released or FOREVER) > made]
        for each in live:
            other = storages[each]
            if max(one.pointer, other.pointer) < min(
                one.pointer + one.bytes, other.pointer + other.bytes
            ):
                interval = rank.at(made) or rank.intervals[0]
                why = f"memory made {rank.made_in(other)} and still alive was given out again"
                yield rank.refuted(interval, why)
        live.append(number)


def _left(rank: WitnessedRank) -> Iterator[Finding]:
    """Find what lives between steps and is no persistent buffer."""
    bound = set(rank.homes.values())
    earlier = before = -1
    for boundary in (each for each in rank.intervals if each.operation is None):
        left: Counter[str] = Counter()
        for number, storage in enumerate(rank.witness.storages):
            made = FOREVER if storage.made is None else storage.made
            first = before > made >= earlier if storage.by_thread else made >= before
            alive = made < boundary.begin < (storage.released or FOREVER)
            if first and alive and number not in bound:
                left[rank.made_in(storage)] += storage.bytes
        earlier, before = before, boundary.begin
        for made_by, size in left.items():
            yield rank.refuted(boundary, f"{size:,} bytes made {made_by} are still alive")


def _above(rank: WitnessedRank) -> Iterator[Finding]:
    """Find the first operation at which more lived than is promised of all pools."""
    role = rank.rank.trace.role
    promised = [size for name, _, size in rank.schedule.contract.peak_bytes if name == role]
    changes: defaultdict[int, int] = defaultdict(int)
    for storage in rank.witness.storages:
        if storage.made is not None:
            changes[storage.made] += storage.bytes
            changes[storage.released or FOREVER] -= storage.bytes
    live = 0
    ticks = iter(sorted(changes))
    tick = next(ticks, FOREVER)
    for interval in rank.intervals:
        while tick < interval.begin:
            live += changes[tick]
            tick = next(ticks, FOREVER)
        if promised and live > sum(promised):
            why = f"{live:,} bytes are alive, promised are at most {sum(promised):,}"
            yield rank.refuted(interval, why)
            return


def touched(rank: WitnessedRank) -> Iterator[Finding]:
    """Find what was read or written and should not have been, or the reverse."""
    return _Accesses(rank).findings()


class _Accesses:
    """Goes through what was read and written, operation by operation."""

    def __init__(self, rank: WitnessedRank) -> None:
        self.rank = rank
        self._owner: dict[int, str] = {}
        self._makers: defaultdict[str, set[int]] = defaultdict(set)

    def findings(self) -> Iterator[Finding]:
        """Find everything that is wrong, in order."""
        for interval, homes in self.rank.with_homes():
            self._owner = {home: buffer for buffer, home in homes.items()}
            operation = interval.operation
            if isinstance(operation, Allocate):
                self._makers[operation.buffer].clear()
            touches = [] if operation is None else list(_touches(operation, self.rank, homes))
            for touch in touches:
                if touch.writes and touch.part.storage is None:
                    self._makers[touch.part.buffer].add(interval.number)
            yield from self._touched(interval, touches)

    def _touched(
        self, interval: MarkedInterval, touches: Sequence[ByteAccess]
    ) -> Iterator[Finding]:
        read: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        written: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for _, reads, writes in interval.touches():
            for region in reads:
                number, low, size = region
                if gap(low, low + size, written[number]) is not None:  # else it reads its own
                    yield from self._judged(interval, touches, region, "reads")
                    read[number].append((low, low + size))
            for region in writes:
                yield from self._judged(interval, touches, region, "writes")
                written[region[0]].append((region[1], region[1] + region[2]))
        operation = interval.operation
        for part, reads_it, writes_it in touches:
            if part.storage is None:
                continue
            if writes_it and _writes_all(operation):
                for whole in self._wholes(operation, part):
                    yield from self._covered(interval, whole, written[part.storage], "write")
            if reads_it and _reads_all(operation) and not self._counted_elsewhere(operation, part):
                yield from self._covered(interval, part, read[part.storage], "read")

    def _counted_elsewhere(self, operation: Operation | None, part: ByteRange) -> bool:
        """Return whether a norm leaves some of `part` to another rank that holds a copy."""
        if not isinstance(operation, Compute) or operation.action is not Action.NORM:
            return False
        layout = self.rank.rank.program.by_name[part.buffer].layout
        pieces = self.rank.schedule.layout_by_name[layout].pieces if layout is not None else ()
        return any(piece.copies for piece in pieces)

    def _wholes(self, operation: Operation | None, part: ByteRange) -> Iterator[ByteRange]:
        """Yield what of `part` has to be written: a copy by parameter leaves what it has not."""
        if not isinstance(operation, Copy) or not operation.by_parameter:
            yield part
            return
        rank = self.rank
        program = rank.rank.program
        width = program.by_name[part.buffer].dtype.size_bytes
        found = rearrangement(rank.schedule, program, operation, rank.coordinates)
        rows = [
            (row.target + number * row.target_step, row.size)
            for row in found.moves
            for number in range(row.rows)
        ]
        for start, size in (*rows, *found.padding):
            high = min((start + size) * width, part.high)
            yield part._replace(low=start * width, high=high)

    def _covered(
        self, interval: MarkedInterval, part: ByteRange, spans: Sequence[tuple[int, int]], verb: str
    ) -> Iterator[Finding]:
        missing = gap(part.low, part.high, spans)
        if missing is not None:
            where = part._replace(low=missing[0], high=missing[1])
            yield self.rank.refuted(interval, f"did not {verb} {where}")

    def _judged(
        self, interval: MarkedInterval, touches: Sequence[ByteAccess], region: Region, verb: str
    ) -> Iterator[Finding]:
        """Find a region that is in no part that may be touched, and not the operation's own."""
        number, low, size = region
        storage = self.rank.witness.storages[number]
        allowed = [one.part for one in touches if (one.reads if verb == "reads" else one.writes)]
        if number in self._owner:
            spans = [(part.low, part.high) for part in allowed if part.storage == number]
            missing = gap(low, low + size, spans)
            if missing is not None:
                where = ByteRange(self._owner[number], number, *missing)
                yield self.rank.refuted(interval, f"{verb} {where}", *_has(allowed))
            return
        if storage.made is None:
            operation = interval.operation
            elsewhere = isinstance(operation, Compute) and operation.action in FROM_ELSEWHERE
            if verb == "reads" and elsewhere:
                return
        else:
            made_in = self.rank.at(storage.made)
            if made_in is interval or any(
                made_in is not None and made_in.number in self._makers[part.buffer]
                for part in allowed
            ):
                return
        why = f"{verb} memory made {self.rank.made_in(storage)}, which is of no buffer that it has"
        yield self.rank.refuted(interval, why, *_has(allowed))


def _has(allowed: Sequence[ByteRange]) -> Iterator[str]:
    for part in allowed:
        yield f"the schedule has {part}"


def _touches(
    operation: Operation, rank: WitnessedRank, homes: Mapping[str, int]
) -> Iterator[ByteAccess]:
    """Yield what `operation` touches on this rank: of a broadcast only the root reads."""
    members = operation.members if isinstance(operation, Together) else (operation,)
    for member in members:
        is_root = True
        if isinstance(member, Broadcast):
            group = rank.schedule.group_by_name[member.group]
            is_root = group.index(rank.schedule.mesh, rank.coordinates) == member.root
        for view, reads, writes in accesses(member):
            part = rank.part(view, homes)
            if part.low < part.high and (writes or is_root):
                yield ByteAccess(part, reads, writes)


def _writes_all(operation: Operation | None) -> bool:
    if isinstance(operation, Compute):
        return operation.action in WRITERS
    return isinstance(operation, StreamOperation)


def _reads_all(operation: Operation | None) -> bool:
    if isinstance(operation, Compute):
        return operation.action in (*WHOLE, Action.NORM)
    if isinstance(operation, Copy):
        return not operation.by_parameter
    return isinstance(operation, Communication | Together | Branch)
