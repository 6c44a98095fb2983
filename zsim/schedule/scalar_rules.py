"""Rules of what hosts count and decide on, names apart: see `zsim.schedule.validate`."""

from zsim.schedule.operation import Branch, SetScalar
from zsim.schedule.program import ScheduleError


def inspect_change(change: SetScalar) -> None:
    """Check that a change of a scalar can be carried out.

    Raises:
        ScheduleError: it cannot.
    """
    if change.every < 1:
        raise ScheduleError(f"{change.id}: every {change.every} must be at least 1")
    if change.minimum > change.maximum:
        raise ScheduleError(
            f"{change.id}: minimum {change.minimum} is above maximum {change.maximum}"
        )


def inspect_decision(branch: Branch) -> None:
    """Check that a branch decides on one number.

    Raises:
        ScheduleError: it does not.
    """
    if (branch.value is None) is (branch.scalar is None):
        raise ScheduleError(f"{branch.id}: a branch reads either a value or a scalar")
    if branch.value is not None and branch.value.size != 1:
        raise ScheduleError(f"{branch.id}: a branch reads 1 element, not {branch.value.size}")
