"""Time of a step that nothing hides: of communication, and of what the host side does."""

from collections.abc import Iterable, Iterator

from zsim.cluster.host_links import HostWork
from zsim.schedule.host_traffic import leaves_device, on_host_threads
from zsim.schedule.operation import Compute, Copy, Fill, Operation, Read, Write
from zsim.schedule.schedule import Place, Program, Schedule
from zsim.trace.trace import Interval, LastStep, RankStep


class HostSide:
    """Tells what operations of a program are to the host side of a node."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self._program = program
        self._places = {pool.name: pool.place for pool in schedule.pools}
        self._has_host = set(self._places.values()) != {Place.DEVICE}

    def work(self, operation: Operation) -> HostWork | None:
        """Return what an operation is to the host side; None if all of it is on the device."""
        if not self._has_host:
            return None
        if isinstance(operation, Read | Write):
            return HostWork.FILES
        if not isinstance(operation, Compute | Copy | Fill):
            return None
        if on_host_threads(operation, self._program, self._places):
            return HostWork.KERNELS
        crosses = type(operation) is Copy and (
            leaves_device(operation, self._program, self._places) is not None
        )
        return HostWork.COPIES if crosses else None


def exposed_ps(step: LastStep) -> tuple[int, dict[str, int]]:
    """Return picoseconds of the step in which a rank communicates and computes nothing.

    In all and by group, of the rank with the most.
    """
    return max((_exposed_of(rank) for rank in step.ranks), key=lambda each: each[0])


def exposed_on_host_ps(step: LastStep) -> dict[str, int]:
    """Return by work of the host side how long a rank waits for it, and neither computes nor sends.

    Of the rank with the most; where two kinds overlap, both.
    """
    found = [_beside_all(rank) for rank in step.ranks]
    return max(found, key=lambda each: max(each.values(), default=0))


def _beside_all(rank: RankStep) -> dict[str, int]:
    groups = [interval for each in rank.by_group.values() for interval in each]
    busy = list(_union([*rank.computing, *groups]))
    return {name: _outside(spans, busy) for name, spans in sorted(rank.on_host.items())}


def _exposed_of(rank: RankStep) -> tuple[int, dict[str, int]]:
    busy = list(_union(rank.computing))
    groups = sorted(rank.by_group.items())
    each = {group: _outside(intervals, busy) for group, intervals in groups}
    if len(each) == 1:
        return next(iter(each.values())), each
    everything = [interval for _, intervals in groups for interval in intervals]
    return _outside(everything, busy), each


def _union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the intervals in order, those that touch made one."""
    current: Interval | None = None
    for start, end in sorted(intervals):
        if current is None or start > current[1]:
            if current is not None:
                yield current
            current = (start, end)
        else:
            current = (current[0], max(current[1], end))
    if current is not None:
        yield current


def _outside(intervals: Iterable[Interval], busy: list[Interval]) -> int:
    """Return how much the intervals cover that `busy`, ordered and apart, does not."""
    covered = list(_union(intervals))
    both = list(_union([*covered, *busy]))
    return sum(end - start for start, end in both) - sum(end - start for start, end in busy)
