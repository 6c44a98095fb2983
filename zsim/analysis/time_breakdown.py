"""Breakdown of a rank's time into non-overlapping activities (`zsim.analysis.exclusive_time`).

The time without computation, communication, host-side work or copies is idle. HTA's temporal
breakdown, which reads `kineto` traces, reports exposed communication and copies as one part.
"""

from dataclasses import dataclass
from typing import assert_never

from zsim.analysis.exclusive_time import COMMUNICATION, COMPUTE, COPY, ON_HOST, exclusive_ps
from zsim.analysis.exposed_time import HostSide
from zsim.cluster.host_links import HostWork
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    SetScalar,
    Together,
)
from zsim.schedule.schedule import Program
from zsim.trace.trace import Event, RankTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Parts of a rank's time between two moments, in picoseconds.

    Attributes:
        span_ps: the whole interval.
        compute_ps: the GPU computes.
        exposed_ps: by group, the rank communicates or waits for peers, and does not compute. If
            two groups overlap, the moment belongs to the one that started first.
        copy_ps: only copies and fills run on the GPU.
        on_host_ps: by host-side work, it runs while the GPU neither computes nor communicates.
            Several kinds at once are ranked in the order of `HostWork`.
    """

    span_ps: int
    compute_ps: int
    exposed_ps: tuple[tuple[str, int], ...]
    copy_ps: int
    on_host_ps: tuple[tuple[str, int], ...] = ()

    @property
    def communication_ps(self) -> int:
        """Exposed communication of all groups."""
        return sum(each for _, each in self.exposed_ps)

    @property
    def idle_ps(self) -> int:
        """Time in which no stream is busy."""
        on_host = sum(each for _, each in self.on_host_ps)
        return self.span_ps - self.compute_ps - self.communication_ps - on_host - self.copy_ps


def breakdown(
    program: Program,
    rank: RankTrace,
    begin_ps: int,
    end_ps: int,
    *,
    host_side: HostSide | None = None,
) -> Breakdown:
    """Return the breakdown of `rank`, which runs `program`, from `begin_ps` to `end_ps`.

    `host_side` identifies host-side work; without it, such work counts as work of the GPU.
    """
    spans = (
        (
            max(event.start_ps, begin_ps),
            min(event.end_ps, end_ps),
            *_kind(program, event, host_side),
        )
        for event in rank.events
        if event.start_ps < end_ps and event.end_ps > begin_ps
    )
    found = exclusive_ps(spans)
    groups = sorted(name for kind, name in found if kind == COMMUNICATION)
    return Breakdown(
        span_ps=end_ps - begin_ps,
        compute_ps=found.get((COMPUTE, ""), 0),
        exposed_ps=tuple((name, found[COMMUNICATION, name]) for name in groups),
        copy_ps=found.get((COPY, ""), 0),
        on_host_ps=tuple(
            (work, found[ON_HOST, work]) for work in HostWork if (ON_HOST, work) in found
        ),
    )


def _kind(program: Program, event: Event, host_side: HostSide | None) -> tuple[str, str]:
    """Return the activity of an event, and its group or its kind of host-side work."""
    operation = program.by_id[event.operation]
    work = None if host_side is None else host_side.work(operation)
    if work is not None:
        return ON_HOST, work
    match operation:
        case Compute():
            return COMPUTE, ""
        case Communication() | Together():
            return COMMUNICATION, operation.group
        case Copy() | Fill():
            return COPY, ""
        case Allocate() | Free() | HostWait() | SetScalar() | Branch():
            raise AssertionError(f"{operation.id}: an action of the host is on no stream")
        case _:
            assert_never(operation)
