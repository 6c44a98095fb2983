"""Breakdown of the time of a rank: every moment is one thing (`zsim.analysis.exclusive_time`).

What is left beside compute, communication, host side and copies is idle. HTA's temporal breakdown
(`kineto` writes what it reads) says the same, with exposed communication and copies as one.
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
    """Picoseconds of a rank between two times.

    Attributes:
        span_ps: all of it.
        compute_ps: the GPU computes.
        exposed_ps: by group, nothing computes and it communicates, or waits for its peers to; of
            two groups at once the moment is that of the one that began first.
        on_host_ps: by work of the host side, the GPU does neither and this runs; of several kinds
            at once, the moment is that of the first in the order of `HostWork`.
        copy_ps: no more than copies and fills on the GPU run.
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
        """No stream does anything."""
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
    """Return what `rank`, which runs `program`, did from `begin_ps` to `end_ps`.

    `host_side` tells what runs on the host; without it all of that is the GPU's.
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
    """Return what an event is, and of which group, or which work of the host side."""
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
