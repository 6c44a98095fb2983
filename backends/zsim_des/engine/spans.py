"""Intervals of a step in which a simulated rank computed or communicated, for exposed time."""

from dataclasses import dataclass, replace

from zsim.schedule.operation import Communication, Compute, Together
from zsim.trace.trace import Interval, RankStep, within
from zsim_des.engine.host_bound import host_bound_in_ps, host_bound_ps
from zsim_des.engine.host_issue import HostIssue
from zsim_des.engine.rank import Rank
from zsim_des.engine.stream import ProgramRun


@dataclass(frozen=True, slots=True)
class SlotKinds:
    """Slots of a course that compute, that communicate (by group), and of the host side."""

    computing: tuple[int, ...]
    by_group: dict[str, tuple[int, ...]]
    on_host: dict[str, tuple[int, ...]]


def slots_of(course: HostIssue) -> SlotKinds:
    """Return the kinds of the slots of `course`; they are the same in every run of it."""
    computing: list[int] = []
    by_group: dict[str, list[int]] = {}
    on_host: dict[str, list[int]] = {}
    for what in course.issued:
        if what.carries is not None:
            on_host.setdefault(what.carries.flow.work, []).append(what.slot)
        elif isinstance(what.operation, Compute):
            computing.append(what.slot)
        elif isinstance(what.operation, Communication | Together):
            by_group.setdefault(what.operation.group, []).append(what.slot)

    def fixed(found: dict[str, list[int]]) -> dict[str, tuple[int, ...]]:
        return {name: tuple(slots) for name, slots in found.items()}

    return SlotKinds(tuple(computing), fixed(by_group), fixed(on_host))


def rank_step(
    rank: Rank, slots: SlotKinds, since_ps: int, step: Interval, *, delays: bool
) -> RankStep:
    """Return the times of the last step, counted from `since_ps`; cut off earlier ones.

    If the schedule `delays` updates, the parts of entries before the step are shifted by one step,
    to where those of the next step would be.
    """
    last = rank.instances[-1]
    host_ps = host_bound_ps(rank.rank_class.program, rank.instances, last.step + 1)
    return replace(
        _part(last, slots, since_ps, step, delays=delays),
        host_bound_ps=host_ps[-1] if host_ps else 0,
        memory_wait_ps=last.memory_wait_ps,
    )


def rank_period(rank: Rank, slots: SlotKinds, since_ps: int, window: Interval) -> RankStep:
    """Return the times of the last step in `window`, both counted from `since_ps`."""
    last = rank.instances[-1]
    clock = (window[0] + since_ps, window[1] + since_ps)
    return replace(
        _part(last, slots, since_ps, window, delays=False),
        host_bound_ps=host_bound_in_ps(rank.rank_class.program, last, clock),
    )


def _part(
    run: ProgramRun, slots: SlotKinds, since_ps: int, window: Interval, *, delays: bool
) -> RankStep:
    """Return the intervals of a run in `window`."""
    starts, ends = run.starts, run.ends

    def spans(of: tuple[int, ...]) -> list[Interval]:
        return [
            found
            for slot in of
            for found in within(
                (starts[slot] - since_ps, ends[slot] - since_ps), window, is_late=delays
            )
        ]

    def named(of: dict[str, tuple[int, ...]]) -> dict[str, list[Interval]]:
        return {name: found for name, each in of.items() if (found := spans(each))}

    return RankStep(
        computing=spans(slots.computing),
        by_group=named(slots.by_group),
        on_host=named(slots.on_host),
    )
