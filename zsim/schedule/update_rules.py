"""Operands of updates: one updated operand, one gradient, and the moments of the rule."""

from collections.abc import Mapping

from zsim.schedule.operation import Compute, Role
from zsim.schedule.program import Scalar, ScheduleError
from zsim.schedule.view_bounds import window_of
from zsim.strategy.optimizer_rule import Optimizer


def inspect_update(update: Compute, scalars: Mapping[str, Scalar]) -> None:
    """Raise ScheduleError unless an update has the operands that its rule needs.

    `scalars` are by name.

    Raises:
        ScheduleError: it does not, or its rule is not an optimizer.
    """
    where, rule = update.id, update.rule
    if not isinstance(rule, Optimizer):
        *names, last = (kind.__name__ for kind in Optimizer.kinds())
        raise ScheduleError(f"{where}: rule {rule} must be {', '.join(names)} or {last}")
    if not rule.element_wise:
        why = "needs whole tensors, and updates are of elements"
        raise ScheduleError(f"{where}: rule {type(rule).__name__} {why}")
    rate = rule.learning_rate
    if isinstance(rate, str) and not (rate in scalars and scalars[rate].given):
        raise ScheduleError(f"{where}: learning rate {rate!r} is no scalar that is given")
    roles = [operand.role for operand in update.operands]
    if (kept := roles.count(Role.MOMENT)) != (needed := rule.moments):
        raise ScheduleError(f"{where}: {kept} moments, {needed} needed by its rule")
    if roles.count(Role.MASTER) + roles.count(Role.PARAMETER) != 1:
        raise ScheduleError(f"{where}: one operand, master or parameter, is updated")
    if roles.count(Role.GRADIENT) != 1:
        raise ScheduleError(f"{where}: one gradient operand is needed")
    sizes = sorted({operand.view.size for operand in update.operands})
    if len(sizes) != 1:
        raise ScheduleError(f"{where}: operands of one size are needed, they have {sizes}")
    if len({window_of(operand.view) for operand in update.operands}) > 1:
        raise ScheduleError(f"{where}: operands are not one window on one layout")


def need_numbers(compute: Compute, role: Role, count: int) -> None:
    """Raise ScheduleError unless `compute` has one operand of `role`, of `count` elements.

    Raises:
        ScheduleError: it does not.
    """
    sizes = [operand.view.size for operand in compute.operands if operand.role is role]
    if sizes != [count]:
        needed = f"{count} element{'s' * (count != 1)} is needed"
        raise ScheduleError(f"{compute.id}: one {role} of {needed}, got {sizes}")
