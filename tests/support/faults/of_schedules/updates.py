"""What an optimizer does: rules, moments, masters, casts, and the numbers that it begins with."""

from collections.abc import Callable, Iterator
from typing import Any

from faults.changes import (
    Aim,
    Edit,
    alone,
    at,
    becomes,
    doubled,
    drops,
    gone,
    in_all,
    made,
    moves,
    one_by_one,
)
from faults.fault import Mutant
from faults.of_schedules.shapes import in_format, resized
from faults.schedules import again, rewritten
from faults.selections import (
    in_setup,
    in_step,
    of_role,
    over_ranks,
    updates,
    with_operands,
    writers,
)
from zsim.dtype import DType
from zsim.schedule.operation import (
    Action,
    AllGather,
    Compute,
    Copy,
    Fill,
    Operation,
    Role,
    SetScalar,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.optimizer_rule import SGD, Adam, Rule


def has_constant_rate(update: Compute) -> bool:
    """Return True if the learning rate of an update is in its rule."""
    rule: Any = update.rule
    return isinstance(rule.learning_rate, float)


def with_rule(update: Compute, **fields: object) -> Compute:
    """Return the update with other fields in its rule."""
    rule: Any = update.rule
    return replace(update, rule=replace(rule, **fields))


def constant(field: str, change: Callable[[float], float], *, one: bool = False) -> Aim:
    """Return the operator that changes a constant in all updates, or in the last one."""

    def having(schedule: Schedule) -> list[Compute]:
        chosen = updates(schedule)[-1:] if one else updates(schedule)
        return [each for each in chosen if isinstance(getattr(each.rule, field, None), float)]

    return in_all(
        having, lambda each: (with_rule(each, **{field: change(getattr(each.rule, field))}),), field
    )


def other_kind(update: Compute) -> Compute:
    """Return an update by SGD without state in place of one that has some.

    Raises:
        ValueError: it has none.
    """
    match update.rule:
        case Adam(learning_rate=rate):
            rule: Rule = SGD(learning_rate=rate)
        case SGD(moments=1) as momentum:
            rule = replace(momentum, momentum=0.0, nesterov=False)
        case _:
            raise ValueError(f"{update.rule} has no state")
    operands = tuple(each for each in update.operands if each.role is not Role.MOMENT)
    return replace(update, rule=rule, operands=operands)


def by_plain_sgd(kind: type[Adam | SGD], *, one: bool) -> Aim:
    """Return the operator that updates by SGD without state instead of a rule that has some."""

    def having(schedule: Schedule) -> list[Compute]:
        found = [
            each
            for each in updates(schedule)
            if isinstance(each.rule, kind) and of_role(each, Role.MOMENT)
        ]
        return found[:1] if one else found

    return in_all(having, lambda each: (other_kind(each),), "SGD")


def with_nesterov(schedule: Schedule) -> list[Compute]:
    return [each for each in updates(schedule) if isinstance(each.rule, SGD) and each.rule.nesterov]


def step_number(*names: str) -> Aim:
    """Return the operator that gives Adam other numbers than that of the step."""

    def counting(schedule: Schedule) -> list[Compute]:
        known = {each.name for each in schedule.scalars} >= set(names)
        return [each for each in updates(schedule) if each.scalars and known]

    return in_all(counting, lambda each: (replace(each, scalars=names),), f"reads {names}")


def moment_begins(number: int) -> Aim:
    """Return the operator that sets a moment to one before the first step."""

    def zeroing(schedule: Schedule) -> list[Fill]:
        views = {
            of_role(each, Role.MOMENT)[number].view.buffer
            for each in updates(schedule)
            if len(of_role(each, Role.MOMENT)) > number
        }
        return [
            each
            for each in in_setup(schedule)
            if isinstance(each, Fill) and each.target.buffer in views
        ]

    return at(zeroing, lambda each: (replace(each, value=1.0),), "begins at 1")


def at_half_rate(update: Compute) -> tuple[Operation, ...]:
    rule: Any = update.rule
    half = with_rule(update, learning_rate=rule.learning_rate / 2)
    return half, again(half)


def with_constant_rate(schedule: Schedule) -> list[Compute]:
    return [each for each in updates(schedule) if has_constant_rate(each)]


def of_another(role: Role) -> Aim:
    """Return the operator that gives an update an operand of another one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for one in updates(schedule):
            for other in updates(schedule):
                mine, theirs = of_role(one, role), of_role(other, role)
                if one.id == other.id or len(mine) != len(theirs) or not mine:
                    continue
                if mine[0].view.size == theirs[0].view.size:
                    rest = [each for each in one.operands if each.role is not role]
                    new = with_operands(one, (*rest, *theirs))
                    yield from one_by_one(schedule, [one], becomes(new), f"{role} of {other.id}")

    return aim


def with_two_moments(schedule: Schedule) -> list[Compute]:
    return [each for each in updates(schedule) if len(of_role(each, Role.MOMENT)) == 2]


def again_with_moments_swapped(update: Compute) -> tuple[Operation, ...]:
    rest = [each for each in update.operands if each.role is not Role.MOMENT]
    moments = of_role(update, Role.MOMENT)
    return update, again(with_operands(update, (*rest, *reversed(moments))))


def casts(schedule: Schedule) -> list[Copy | AllGather]:
    """Return casts and gathers of updated parameters."""
    names = {
        each.view.buffer
        for update in updates(schedule)
        for each in update.operands
        if each.role in (Role.MASTER, Role.PARAMETER)
    }
    found: list[Copy | AllGather] = []
    for each in in_step(schedule):
        if isinstance(each, Copy | AllGather) and each.source.buffer in names:
            names.add(each.target.buffer)
            found.append(each)
    return found


def carried_before_the_update(schedule: Schedule) -> Iterator[Edit]:
    for each in casts(schedule):
        for writer in writers(schedule, each.source.buffer)[:1]:
            text = f"{each.id} before {writer.id}"
            yield from made(schedule, moves(each.id, before=writer.id), text)


def half_updated(schedule: Schedule) -> Iterator[Edit]:
    for each in updates(schedule):
        try:
            less = resized(
                schedule, each, lambda view, _: replace(view, size=max(1, view.size // 2))
            )
        except ValueError:
            continue
        yield from one_by_one(schedule, [each], becomes(less), "half")


def not_updated_by_one(schedule: Schedule) -> Iterator[Edit]:
    names = [each.id for each in updates(schedule)]
    yield from alone(schedule, drops(*names[:1]), f"no {names[:1]}")


def rate_of_one_rank(schedule: Schedule) -> Iterator[Edit]:
    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute) and each.action is Action.UPDATE and has_constant_rate(each):
            rule: Any = each.rule
            return (with_rule(each, learning_rate=2 * rule.learning_rate),)
        return (each,)

    yield from alone(schedule, lambda program: rewritten(program, change), "twice the rate")


def initial(value: float) -> Aim:
    """Return the operator that fills a parameter with a number where set-up initializes it."""

    def initializing(schedule: Schedule) -> list[Compute]:
        return [
            each
            for each in in_setup(schedule)
            if isinstance(each, Compute) and each.action is Action.INITIALIZE
        ]

    def fill(each: Compute) -> tuple[Operation, ...]:
        view = each.operands[0].view
        return (Fill(id=each.id, stream=each.stream, target=view, value=value),)

    return at(initializing, fill, f"is {value} at first")


def counters(schedule: Schedule) -> list[SetScalar]:
    return [
        each for each in in_step(schedule) if isinstance(each, SetScalar) and each.scalar == "step"
    ]


def counted_late(schedule: Schedule) -> Iterator[Edit]:
    for each in counters(schedule):
        for last in updates(schedule)[-1:]:
            yield from made(schedule, moves(each.id, after=last.id), "counted after updates")


def counted_from_one(schedule: Schedule) -> Iterator[Edit]:
    found = tuple(
        replace(each, initial=1.0) if each.name == "step" else each for each in schedule.scalars
    )
    yield Mutant.of("the first step is the second", replace(schedule, scalars=found))


def kept_in(kind: Kind, dtype: DType) -> Aim:
    """Return the operator that keeps a buffer of the optimizer in another format."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for program in schedule.programs[:1]:
            for buffer in program.buffers:
                if buffer.kind is kind and buffer.dtype in (DType.FP32, DType.FP64):
                    yield from in_format(schedule, {buffer.name}, dtype)

    return aim


def without_the_last_wait(schedule: Schedule) -> Iterator[Edit]:
    """Read a reduced gradient without waiting for its reduction."""
    reductions = {each.id for each in over_ranks(schedule)}
    waiting = [
        each
        for each in in_step(schedule)
        if reductions & {edge for edge in getattr(each, "after", ()) if isinstance(edge, str)}
    ]

    def unbound(each: Compute) -> tuple[Operation, ...]:
        return (replace(each, after=tuple(edge for edge in each.after if edge not in reductions)),)

    yield from one_by_one(schedule, waiting, unbound, "does not wait")


UPDATES: dict[str, Aim] = {
    "rate times 1000 in every update": constant("learning_rate", lambda rate: rate * 1000),
    "rate times 1000 in one update": constant("learning_rate", lambda rate: rate * 1000, one=True),
    "negative rate": constant("learning_rate", lambda rate: -rate),
    "other beta1": constant("beta1", lambda beta: beta / 2),
    "other beta2 in one update": constant("beta2", lambda beta: beta / 2, one=True),
    "other epsilon": constant("epsilon", lambda epsilon: epsilon * 2),
    "weight decay": constant("weight_decay", lambda decay: decay + 0.125),
    "SGD for Adam": by_plain_sgd(Adam, one=False),
    "SGD for Adam in one update": by_plain_sgd(Adam, one=True),
    "no momentum": by_plain_sgd(SGD, one=False),
    "no momentum in one update": by_plain_sgd(SGD, one=True),
    "other momentum": constant("momentum", lambda momentum: momentum / 2),
    "no Nesterov momentum": in_all(
        with_nesterov, lambda each: (with_rule(each, nesterov=False),), "plain momentum"
    ),
    "Adam without a step number": step_number(),
    "Adam with the loss scale for a step number": step_number("loss_scale"),
    "Adam with good steps for a step number": step_number("good_steps"),
    "first moment begins at 1": moment_begins(0),
    "second moment begins at 1": moment_begins(1),
    "update twice": at(updates, doubled, "twice"),
    "update twice at half the rate": at(with_constant_rate, at_half_rate, "twice at half the rate"),
    "update again with moments swapped": at(
        with_two_moments, again_with_moments_swapped, "again with moments swapped"
    ),
    "moments of another update": of_another(Role.MOMENT),
    "gradient of another update": of_another(Role.GRADIENT),
    "cast or gather before the update": carried_before_the_update,
    "no cast or gather after the update": at(casts, gone, "gone"),
    "half of an update": half_updated,
    "no update": at(updates, gone, "gone"),
    "no update on one rank": not_updated_by_one,
    "another rate on one rank": rate_of_one_rank,
    "parameters begin at 0": initial(0.0),
    "parameters begin at 1": initial(1.0),
    "step counted twice": in_all(counters, lambda each: (replace(each, add=2.0),), "counts 2"),
    "step not counted": in_all(counters, gone, "not counted"),
    "step counted after updates": counted_late,
    "first step is the second": counted_from_one,
    "master in a poorer format": kept_in(Kind.MASTER, DType.BF16),
    "moment in a poorer format": kept_in(Kind.MOMENT, DType.FP16),
    "parameter in a poorer format": kept_in(Kind.PARAMETER, DType.FP8),
    "reduction is not waited for": without_the_last_wait,
}
