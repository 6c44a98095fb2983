"""A rank's witness, cut at its marks, with the places of its program's buffers.

A buffer that the program allocates is the one storage that was made when the host reached its
`Allocate`; the places of its views follow from the storage's pointer. Tensors made by autograd are
in any storage made during an operation that writes the buffer.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.proof.finding import Finding
from zsim.proof.traced_rank import TracedRank, in_words, refuted
from zsim.schedule.issue_order import SETUP
from zsim.schedule.operation import Allocate, Free, Operation, View
from zsim.schedule.schedule import Schedule
from zsim.trace.witness import Call, Region, Storage, Witness, WitnessedCollective

FOREVER = 1 << 62
"""Later than every tick."""


@dataclass(slots=True, eq=False)
class MarkedInterval:
    """Calls seen from one mark to the next. Without an operation it starts at the end of a step."""

    number: int
    step: int
    operation: Operation | None
    begin: int
    end: int = FOREVER
    calls: list[Call] = field(default_factory=list[Call])
    collectives: list[WitnessedCollective] = field(default_factory=list[WitnessedCollective])
    made: list[int] = field(default_factory=list[int])

    def touches(self) -> list[tuple[int, tuple[Region, ...], tuple[Region, ...]]]:
        """Return (tick, reads, writes) of calls and collectives."""
        found = [(call.tick, call.reads, call.writes) for call in self.calls]
        found += [(each.tick, *sides(each)) for each in self.collectives]
        return sorted(found)

    @property
    def name(self) -> str:
        """Its description."""
        if self.operation is None:
            return "the end of setup" if self.step == SETUP else f"the end of step {self.step}"
        return in_words((self.step, self.operation.id))


class ByteRange(NamedTuple):
    """Bytes of a buffer; `storage` is None for tensors made by autograd."""

    buffer: str
    storage: int | None
    low: int
    high: int

    def __str__(self) -> str:
        return f"bytes {self.low:,} to {self.high:,} of {self.buffer}"


class WitnessedRank:
    """One rank of a trace that has a witness.

    Attributes:
        intervals: the observed calls, operation by operation.
        homes: the storage of each allocated buffer, by interval of its `Allocate`.
        misses: allocations without a storage, or with several.
    """

    def __init__(self, schedule: Schedule, rank: TracedRank, witness: Witness) -> None:
        self.schedule = schedule
        self.rank = rank
        self.witness = witness
        self.coordinates = schedule.mesh.coordinates(rank.trace.rank)
        self.intervals = self._cut()
        self.homes: dict[int, int] = {}
        self.misses: list[tuple[MarkedInterval, str]] = []
        for interval in self.intervals:
            self._settle(interval)
        self._starts = [interval.begin for interval in self.intervals]

    @classmethod
    def of(
        cls, schedule: Schedule, rank: TracedRank, witness: Witness
    ) -> "WitnessedRank | Finding":
        """Return the rank, or a finding if its host reached operations not in its program."""
        expected = [(step, name) for step, name, _ in _issued(rank)]
        found = [(mark.step, mark.operation) for mark in witness.marks]
        if expected == found:
            return cls(schedule, rank, witness)
        place = next(
            (at for at, pair in enumerate(zip(expected, found, strict=False)) if len({*pair}) > 1),
            min(len(expected), len(found)),
        )
        lines = [
            f"{who} {in_words(those[place]) if place < len(those) else 'nothing'}"
            for who, those in (("the schedule has", expected), ("the host came to", found))
        ]
        name = (*expected[place : place + 1], *found[place : place + 1])[0][1]
        return refuted(name, "the host came to something else", *lines, role=rank.name)

    def with_homes(self) -> Iterator[tuple[MarkedInterval, dict[str, int]]]:
        """Yield every interval, with the storages of the buffers allocated then."""
        homes: dict[str, int] = {}
        for interval in self.intervals:
            if isinstance(interval.operation, Allocate) and interval.number in self.homes:
                homes[interval.operation.buffer] = self.homes[interval.number]
            yield interval, homes
            if isinstance(interval.operation, Free):
                homes.pop(interval.operation.buffer, None)

    def part(self, view: View, homes: Mapping[str, int]) -> "ByteRange":
        """Return the bytes of `view` on this rank."""
        start, size = self.schedule.extent(view, self.coordinates)
        width = self.rank.program.by_name[view.buffer].dtype.size_bytes
        low, high = start * width, (start + size) * width
        return ByteRange(view.buffer, homes.get(view.buffer), low, high)

    def refuted(self, interval: MarkedInterval, why: str, *lines: str) -> Finding:
        """Return a finding about `interval`."""
        name = interval.operation.id if interval.operation is not None else "trace/steps"
        where = " in setup" if interval.step == SETUP else f" in step {interval.step}"
        return refuted(name, f"{why}{where}", *lines, role=self.rank.name)

    def at(self, tick: int) -> MarkedInterval | None:
        """Return the interval that contains `tick`; None before the first."""
        place = bisect_right(self._starts, tick) - 1
        return self.intervals[place] if place >= 0 else None

    def made_in(self, storage: Storage) -> str:
        """Return text for the time at which `storage` was made."""
        interval = None if storage.made is None else self.at(storage.made)
        return "before the run" if interval is None else f"by {interval.name}"

    def _cut(self) -> list[MarkedInterval]:
        intervals: list[MarkedInterval] = []
        for mark, (step, _, operation) in zip(self.witness.marks, _issued(self.rank), strict=True):
            if intervals:
                intervals[-1].end = mark.tick
            intervals.append(MarkedInterval(len(intervals), step, operation, mark.tick))
        starts = [interval.begin for interval in intervals]

        def holder(tick: int) -> MarkedInterval:
            return intervals[max(0, bisect_right(starts, tick) - 1)]

        for call in self.witness.calls:
            holder(call.tick).calls.append(call)
        for collective in self.witness.collectives:
            holder(collective.tick).collectives.append(collective)
        for number, storage in enumerate(self.witness.storages):
            if storage.made is not None:
                holder(storage.made).made.append(number)
        return intervals

    def _settle(self, interval: MarkedInterval) -> None:
        """Find the storage of the buffer that `interval` allocates."""
        operation = interval.operation
        if not isinstance(operation, Allocate):
            return
        buffer = self.rank.program.by_name[operation.buffer]
        wanted = 0 if buffer.produced else buffer.size_bytes
        sizes = [self.witness.storages[number].bytes for number in interval.made]
        if sizes != [wanted] * bool(wanted):
            took = " and ".join(f"{size:,}" for size in sizes) or "no"
            self.misses.append((interval, f"{took} bytes were taken, it takes {wanted:,}"))
        elif wanted:
            self.homes[interval.number] = interval.made[0]


def _issued(rank: TracedRank) -> Iterator[tuple[int, str, Operation | None]]:
    """Yield step, name and operation of each expected mark."""
    by_step: defaultdict[int, list[Operation]] = defaultdict(list)
    for step, operation in rank.issued:
        by_step[step].append(operation)
    for step in range(SETUP, rank.steps):
        for operation in by_step[step]:
            yield step, operation.id, operation
        yield step, "", None


def sides(one: WitnessedCollective) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Return the regions that a collective reads and writes; ranks that are not root read none."""
    reads = (one.source,) if one.source is not None and one.brought else ()
    return reads, (one.target,) if one.target is not None else ()


def gap(low: int, high: int, spans: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first range in [low, high) that no span covers, or None."""
    for start, end in sorted(spans):
        if low >= high or start > low:
            break
        low = max(low, end)
    if low >= high:
        return None
    return low, min([high, *(start for start, _ in spans if start > low)])
