"""Memory of a rank as torch used it: lifetimes of storages, and their reads and writes.

Proved of each operation: it wrote all its outputs and nothing else, and read nothing but its
inputs, in the storages of its buffers; copies and updates read all elements, put each in its
place, and wrote it once. Tensors made by autograd are identified only by the operation that made
them. Not shown: that a gradient belongs to this parameter and not to another one of its unit, and
that kernels compute the right function.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zsim.proof.finding import Finding
from zsim.proof.traced_ledger import freed_at
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
"""Computations that write all elements of their outputs, in place."""

FROM_ELSEWHERE = (
    Action.LOAD,
    Action.INITIALIZE,
    *OF_SEGMENTS,
)
"""Computations that may read memory outside buffers: data, initial values, module constants."""


class ByteAccess(NamedTuple):
    """A part of a buffer that an operation reads or writes."""

    part: ByteRange
    reads: bool
    writes: bool


def lifetimes(rank: WitnessedRank) -> Iterator[Finding]:
    """Find memory with another lifetime than the log, overlapping memory, and exceeded peaks."""
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
    """Return True if a thread of torch.distributed may have released the memory late.

    It releases the tensors of a collective after the collective is complete, up to a step later.
    """
    return (
        storage.by_thread
        and actual is not None
        and expected is not None
        and expected.number < actual.number
        and actual.step <= expected.step + 1
    )


def _overlaps(rank: WitnessedRank) -> Iterator[Finding]:
    """Find storages that were alive at the same time and share bytes."""
    storages = rank.witness.storages
    live: list[int] = []
    for number, one in enumerate(storages):
        made = one.made
        if made is None:  # the time of its allocation is unknown
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
    """Find storages that are alive between steps without being persistent buffers."""
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
    """Find the first operation at which more bytes were alive than promised for all pools."""
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
    """Find missing and unexpected reads and writes."""
    return _Accesses(rank).findings()


class _Accesses:
    """Checks reads and writes, operation by operation."""

    def __init__(self, rank: WitnessedRank) -> None:
        self.rank = rank
        self._owner: dict[int, str] = {}
        self._makers: defaultdict[str, set[int]] = defaultdict(set)

    def findings(self) -> Iterator[Finding]:
        """Yield all findings in order."""
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
                if gap(low, low + size, written[number]) is not None:  # else its own result
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
        """Return True if a norm leaves some of `part` to another rank that holds a copy."""
        if not isinstance(operation, Compute) or operation.action is not Action.NORM:
            return False
        layout = self.rank.rank.program.by_name[part.buffer].layout
        pieces = self.rank.schedule.layout_by_name[layout].pieces if layout is not None else ()
        return any(piece.copies for piece in pieces)

    def _wholes(self, operation: Operation | None, part: ByteRange) -> Iterator[ByteRange]:
        """Yield the parts of `part` that must be written; a copy by parameter writes only moves."""
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
        """Yield a finding if a region is in no allowed part, and not the operation's own memory."""
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
    """Yield the accesses of `operation` on this rank; only the root of a broadcast reads."""
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
