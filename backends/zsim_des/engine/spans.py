"""Spans in which a simulated rank computed and communicated in a step, for exposed time."""

from dataclasses import dataclass

from zsim.schedule.operation import Communication, Compute, Together
from zsim.trace.trace import Interval, RankStep
from zsim_des.engine.host_bound import host_bound_ps
from zsim_des.engine.host_issue import HostIssue
from zsim_des.engine.rank import Rank


@dataclass(frozen=True, slots=True)
class SlotKinds:
    """Slots of a course that compute on the GPU, and by group those that communicate."""

    computing: tuple[int, ...]
    by_group: dict[str, tuple[int, ...]]


def slots_of(course: HostIssue) -> SlotKinds:
    """Return what the slots of `course` do; the same in every run of it."""
    computing: list[int] = []
    by_group: dict[str, list[int]] = {}
    for what in course.issued:
        if isinstance(what.operation, Compute):
            if what.carries is None:  # host threads compute beside the GPU
                computing.append(what.slot)
        elif isinstance(what.operation, Communication | Together):
            by_group.setdefault(what.operation.group, []).append(what.slot)
    groups = {group: tuple(slots) for group, slots in by_group.items()}
    return SlotKinds(tuple(computing), groups)


def rank_step(rank: Rank, slots: SlotKinds, since_ps: int, begin_ps: int) -> RankStep:
    """Return the times of the last step from `since_ps`; what was before `begin_ps` is cut off.

    The step ends with the last of it, so nothing is cut off there.
    """
    last = rank.instances[-1]
    starts, ends, first_ps = last.starts, last.ends, since_ps + begin_ps

    def spans(of: tuple[int, ...]) -> list[Interval]:
        return [
            (max(starts[slot], first_ps) - since_ps, ends[slot] - since_ps)
            for slot in of
            if ends[slot] > first_ps
        ]

    by_group = {group: found for group, of in slots.by_group.items() if (found := spans(of))}
    host_ps = host_bound_ps(rank.rank_class.program, rank.instances, last.step + 1)
    return RankStep(
        computing=spans(slots.computing),
        by_group=by_group,
        host_bound_ps=host_ps[-1] if host_ps else 0,
        memory_wait_ps=last.memory_wait_ps,
    )
