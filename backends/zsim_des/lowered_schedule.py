"""A schedule as the simulator keeps it from question to question: instructions, folds, slots."""

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
"""States of a cluster whose folds are kept."""


@dataclass(frozen=True, slots=True)
class LoweredSchedule:
    """Instructions by role and the groups in use, and what they were made from.

    `asking` are the instructions of hosts that ask for memory, once that was needed.
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
        """Return what the slots of `course` do, which the programs keep."""
        found = self.slots_by_course.get(id(course))
        if found is None:
            found = self.slots_by_course[id(course)] = slots_of(course)
        return found

    def fold(self, trouble: Trouble, *, unfold: bool) -> Fold:
        """Return the classes of the schedule; kept for clusters that differ in bandwidths alone."""
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
