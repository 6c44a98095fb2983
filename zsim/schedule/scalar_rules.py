"""Rules of scalars and branches, except their names: see `zsim.schedule.validate`."""

from zsim.schedule.operation import Branch, SetScalar
from zsim.schedule.program import ScheduleError


def inspect_change(change: SetScalar) -> None:
    """Raise ScheduleError unless a change of a scalar can be carried out.

    Raises:
        ScheduleError: `every` is below 1, or `minimum` is above `maximum`.
    """
    if change.every < 1:
        raise ScheduleError(f"{change.id}: every {change.every} must be at least 1")
    if change.minimum > change.maximum:
        raise ScheduleError(
            f"{change.id}: minimum {change.minimum} is above maximum {change.maximum}"
        )


def inspect_decision(branch: Branch) -> None:
    """Raise ScheduleError unless a branch decides on one number.

    Raises:
        ScheduleError: it reads neither or both of value and scalar, or several elements.
    """
    if (branch.value is None) is (branch.scalar is None):
        raise ScheduleError(f"{branch.id}: a branch reads either a value or a scalar")
    if branch.value is not None and branch.value.size != 1:
        raise ScheduleError(f"{branch.id}: a branch reads 1 element, not {branch.value.size}")
