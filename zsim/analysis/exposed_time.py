"""Exposed time of a step: communication and host-side work that no computation overlaps."""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.analysis.exclusive_time import COMMUNICATION, COMPUTE, ON_HOST, Span, exclusive_ps
from zsim.cluster.host_links import HostWork
from zsim.schedule.host_traffic import leaves_device, on_host_threads
from zsim.schedule.operation import Compute, Copy, Fill, Operation, Read, Write
from zsim.schedule.schedule import Place, Program, Schedule
from zsim.trace.trace import LastStep, RankStep


class HostSide:
    """Classify the operations of a program by the host-side work that they cause."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self._program = program
        self._places = {pool.name: pool.place for pool in schedule.pools}
        self._has_host = set(self._places.values()) != {Place.DEVICE}

    def work(self, operation: Operation) -> HostWork | None:
        """Return the kind of host-side work; None if the operation stays on the device."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Non-overlapping parts of a rank's step, in picoseconds.

    Attributes:
        compute_ps: the rank computes.
        by_group: by group, the rank communicates or waits for peers, and does not compute.
        on_host: by host-side work, the rank waits for it and neither computes nor communicates.
    """

    compute_ps: int
    by_group: dict[str, int]
    on_host: dict[str, int]

    @property
    def exposed_ps(self) -> int:
        """Exposed communication of all groups."""
        return sum(self.by_group.values())


def step_parts(step: LastStep) -> StepParts:
    """Return the parts of the step for the rank with the most exposed communication."""
    return most_exposed(map(parts_of, step.ranks))


def most_exposed(found: Iterable[StepParts]) -> StepParts:
    """Return the parts of the rank with the most exposed communication."""
    return max(found, key=lambda each: (each.exposed_ps, sum(each.on_host.values())))


def parts_of(rank: RankStep) -> StepParts:
    """Return the parts of the step on one rank."""
    spans: list[Span] = [(start, end, COMPUTE, "") for start, end in rank.computing]
    for kind, named in ((COMMUNICATION, rank.by_group), (ON_HOST, rank.on_host)):
        spans += [(*each, kind, name) for name, intervals in named.items() for each in intervals]
    found = exclusive_ps(spans)
    return StepParts(
        compute_ps=found.get((COMPUTE, ""), 0),
        by_group={name: found.get((COMMUNICATION, name), 0) for name in sorted(rank.by_group)},
        on_host={name: found.get((ON_HOST, name), 0) for name in sorted(rank.on_host)},
    )
