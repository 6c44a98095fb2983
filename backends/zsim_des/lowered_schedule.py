"""A schedule as the simulator keeps it between simulations: instructions, folds, slots."""

from dataclasses import dataclass, field

from zsim.cluster.cluster import Gpu
from zsim.schedule.schedule import Schedule
from zsim_des.engine.host_issue import Courses, HostIssue
from zsim_des.engine.spans import SlotKinds, slots_of
from zsim_des.engine.worst_case import WorstCases
from zsim_des.network.communicator_placement import Used
from zsim_des.symmetry.classes import Fold
from zsim_des.symmetry.fault_state import Trouble
from zsim_des.symmetry.fold import fold

FOLDS_KEPT = 1000
"""Maximum number of cluster states whose folds are kept."""


@dataclass(frozen=True, slots=True)
class LoweredSchedule:
    """Instructions by role and the groups in use, with the schedule and GPU of their origin.

    `asking` are the instructions of hosts that request memory, filled at first use.
    """

    schedule: Schedule
    gpu: Gpu
    programs: dict[str, Courses]
    used: Used
    worst_cases: WorstCases
    asking: dict[str, Courses] = field(default_factory=dict[str, Courses])
    folds: dict[object, Fold] = field(default_factory=dict[object, Fold])
    slots_by_course: dict[int, SlotKinds] = field(default_factory=dict[int, SlotKinds])

    def slots(self, course: HostIssue) -> SlotKinds:
        """Return the kinds of the slots of `course`, computed once per course."""
        found = self.slots_by_course.get(id(course))
        if found is None:
            found = self.slots_by_course[id(course)] = slots_of(course)
        return found

    def fold(self, trouble: Trouble, *, unfold: bool) -> Fold:
        """Return the classes of the schedule; clusters that differ only in bandwidth share them."""
        if unfold:
            return fold(self.schedule, trouble, unfold=True, used=self.used)
        key = trouble.shape()
        found = self.folds.get(key)
        if found is None:
            found = fold(self.schedule, trouble, used=self.used)
            if len(self.folds) >= FOLDS_KEPT:
                self.folds.clear()
            self.folds[key] = found
        return found
