"""Where the time of a step goes: every moment of it belongs to one cause.

In this order: the GPU computes; it communicates, and does not compute; it copies alone; it is idle.
Communication during computation is hidden, and counted separately.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import Final, NamedTuple

from zsim_explain.trace.recorded_rank import (
    ALLOCATE,
    LOAD,
    ON_GPU,
    WAIT,
    DeviceWork,
    HostCall,
    RecordedRank,
    RecordedStep,
)


class LedgerPart(StrEnum):
    """Part of a step."""

    COMPUTE = "compute"
    EXPOSED = "exposed communication"
    COPY = "copies"
    HOST = "host"
    UNKNOWN = "unexplained"
    LATE = "late rank"


class TimeCause(NamedTuple):
    """Why time passed: part, kind, and the group of a collective."""

    part: LedgerPart
    what: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.what} of {self.group}" if self.group else self.what


LAUNCHES: Final = TimeCause(LedgerPart.HOST, "late launches")
LATENCY: Final = TimeCause(LedgerPart.HOST, "launch latency")
QUEUED: Final = TimeCause(LedgerPart.UNKNOWN, "launched, but not started")
NO_LAUNCH: Final = TimeCause(LedgerPart.UNKNOWN, "launches are not recorded")

DRAINED_US: Final = 5.0
"""A synchronisation has drained the queue if it starts at most this long after the GPU is idle."""

COPIES: Final = ("copy to GPU", "copy to host", ON_GPU, "fill")


class StepLedger(NamedTuple):
    """Microseconds of a step by cause, which add up to it; and communication that was hidden."""

    spent: defaultdict[TimeCause, float]
    hidden: defaultdict[TimeCause, float]

    @property
    def total(self) -> float:
        """The step, in microseconds."""
        return sum(self.spent.values())


def ledger(rank: RecordedRank, step: RecordedStep) -> StepLedger:
    """Return the ledger of `step` of `rank`."""
    inside = [each for each in rank.work if each.end > step.start and each.start < step.end]
    found = StepLedger(defaultdict(float), defaultdict(float))
    starts = [each.start for each in inside]
    for start, end, busy in _intervals(inside, step):
        took = end - start
        computing = [each for each in busy if each.part is LedgerPart.COMPUTE]
        moving = [each for each in busy if each.part in (LedgerPart.EXPOSED, LedgerPart.LATE)]
        if computing:
            found.spent[min(computing)] += took
            if moving:
                found.hidden[min(moving)] += took
        elif moving:
            found.spent[min(moving)] += took
        elif busy:
            found.spent[min(busy)] += took
        else:
            index = bisect_left(starts, end - 1e-3)
            following = (
                inside[index] if index < len(inside) and starts[index] <= end + 1e-3 else None
            )
            for cause, part in _idle(rank, (start, end), following):
                found.spent[cause] += part
    return found


def _cause(work: DeviceWork) -> TimeCause:
    if work.waits_for is not None:
        return TimeCause(LedgerPart.LATE, f"waits for rank {work.waits_for}")
    if work.collective is not None:
        return TimeCause(LedgerPart.EXPOSED, work.collective.kind, work.collective.group)
    return TimeCause(LedgerPart.COPY if work.what in COPIES else LedgerPart.COMPUTE, work.what)


def _intervals(
    inside: Iterable[DeviceWork], step: RecordedStep
) -> Iterator[tuple[float, float, list[TimeCause]]]:
    """Yield the intervals of a step in which the same causes are at work, with these."""
    edges: list[tuple[float, int, TimeCause]] = []
    for each in inside:
        cause = _cause(each)
        edges += [(max(each.start, step.start), 1, cause), (min(each.end, step.end), -1, cause)]
    edges.sort(key=lambda edge: edge[:2])
    live: defaultdict[TimeCause, float] = defaultdict(float)
    last = step.start
    for at, change, cause in edges:
        if at > last:
            yield last, at, [each for each, count in live.items() if count]
            last = at
        live[cause] += change
    if step.end > last:
        yield last, step.end, []


def _idle(
    rank: RecordedRank, gap: tuple[float, float], following: DeviceWork | None
) -> Iterator[tuple[TimeCause, float]]:
    """Yield why the GPU was idle in `gap`, before the work `following` started.

    Until its launch the host was late; after it, the work waited.
    """
    start, end = gap
    launch = end if following is None else rank.launches.get(following.correlation)
    if launch is None:
        yield NO_LAUNCH, end - start
        return
    issued = min(max(launch, start), end)
    calls = _calls(rank, gap)
    left = issued - start
    for what in (LOAD, ALLOCATE, WAIT):
        taken = min(left, _covered(calls, what, start, issued))
        if taken:
            yield TimeCause(LedgerPart.HOST, what), taken
            left -= taken
    if left:
        drained = any(
            each.what == WAIT
            and each.start <= start + DRAINED_US
            and each.end - each.start > DRAINED_US
            for each in calls
        )
        yield (TimeCause(LedgerPart.HOST, WAIT) if drained else LAUNCHES), left
    waited = end - issued
    taken = min(waited, _covered(calls, ALLOCATE, issued, end))
    if taken:
        yield TimeCause(LedgerPart.HOST, ALLOCATE), taken
        waited -= taken
    if waited:
        yield (LATENCY if waited <= rank.latency else QUEUED), waited


def _calls(rank: RecordedRank, gap: tuple[float, float]) -> list[HostCall]:
    """Return the host calls that overlap `gap`."""
    start, end = gap
    first = bisect_left(rank.calls, start - rank.longest_call, key=attrgetter("start"))
    before = bisect_left(rank.calls, end, key=attrgetter("start"))
    return [each for each in rank.calls[first:before] if each.end > start]


def _covered(calls: Sequence[HostCall], what: str, start: float, end: float) -> float:
    """Return the time from `start` to `end` in which at least one call of kind `what` runs."""
    total, reached = 0.0, start
    for each in calls:
        if each.what == what:
            first = max(each.start, reached)
            if (last := min(each.end, end)) > first:
                total += last - first
                reached = last
    return total
