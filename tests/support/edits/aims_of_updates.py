"""Named edits of what an optimizer does: rules, moments, masters, casts, what it begins with."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from edits.aim import (
    Aim,
    again,
    alone,
    becomes,
    computes,
    drops,
    in_setup,
    in_step,
    made,
    moves,
    of_role,
    one_by_one,
    over_ranks,
    through,
    with_operands,
    writers,
)
from edits.programs import Edit, rewritten
from edits.shape import in_format, resized
from edits.state import other_kind
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
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.optimizer_rule import SGD, Adam


def updates(schedule: Schedule) -> list[Compute]:
    """Updates of a step."""
    return computes(schedule, Action.UPDATE)


def has_constant_rate(update: Compute) -> bool:
    """Whether the learning rate of an update is in its rule."""
    return isinstance(cast("Any", update.rule).learning_rate, float)


def constant(field: str, change: Callable[[float], float], *, one: bool = False) -> Aim:
    """Another constant in all updates, or in the last one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        chosen = {each.id for each in (updates(schedule)[-1:] if one else updates(schedule))}

        def new(each: Operation) -> tuple[Operation, ...] | None:
            if not isinstance(each, Compute) or each.id not in chosen:
                return None
            value = getattr(each.rule, field, None)
            if not isinstance(value, float):
                return None
            rule = replace(cast("Any", each.rule), **{field: change(value)})
            return (replace(each, rule=rule),)

        yield from through(schedule, new, f"{field} in {len(chosen)} updates")

    return aim


def without_nesterov(schedule: Schedule) -> Iterator[Edit]:
    """Momentum where the strategy says Nesterov's."""

    def change(each: Operation) -> tuple[Operation, ...] | None:
        if isinstance(each, Compute) and isinstance(each.rule, SGD) and each.rule.nesterov:
            return (replace(each, rule=replace(each.rule, nesterov=False)),)
        return None

    yield from through(schedule, change, "plain momentum")


def by_plain_sgd(kind: type[Adam | SGD], *, one: bool) -> Aim:
    """SGD that keeps nothing where the strategy says a rule that does."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        found = [
            each
            for each in updates(schedule)
            if isinstance(each.rule, kind) and of_role(each, Role.MOMENT)
        ]
        chosen = {each.id for each in (found[:1] if one else found)}
        yield from through(
            schedule,
            lambda each: (other_kind(cast("Compute", each)),) if each.id in chosen else None,
            f"SGD in {len(chosen)} updates",
        )

    return aim


def step_number(names: tuple[str, ...]) -> Aim:
    """Adam is given another number than that of the step."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        known = {each.name for each in schedule.scalars}
        if known >= set(names):
            yield from through(
                schedule,
                lambda each: (
                    (replace(each, scalars=names),)
                    if isinstance(each, Compute) and each.action is Action.UPDATE and each.scalars
                    else None
                ),
                f"updates read {names}",
            )

    return aim


def moment_begins(number: int) -> Aim:
    """A moment is one before the first step."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        views = {
            of_role(each, Role.MOMENT)[number].view.buffer
            for each in updates(schedule)
            if len(of_role(each, Role.MOMENT)) > number
        }
        fills = [
            each
            for each in in_setup(schedule)
            if isinstance(each, Fill) and each.target.buffer in views
        ]
        yield from one_by_one(
            schedule, fills, lambda each: (replace(cast("Fill", each), value=1.0),), "begins at 1"
        )

    return aim


def twice_at_half_rate(schedule: Schedule) -> Iterator[Edit]:
    def halves(each: Operation) -> tuple[Operation, ...]:
        update = cast("Compute", each)
        rule = cast("Any", update.rule)
        half = replace(update, rule=replace(rule, learning_rate=rule.learning_rate / 2))
        return half, again(half)

    constant = [each for each in updates(schedule) if has_constant_rate(each)]
    yield from one_by_one(schedule, constant, halves, "twice at half the rate")


def twice(schedule: Schedule) -> Iterator[Edit]:
    yield from one_by_one(schedule, updates(schedule), lambda each: (each, again(each)), "twice")


def of_another(role: Role) -> Aim:
    """An update takes an operand of another one."""

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


def moments_swapped_on_one(schedule: Schedule) -> Iterator[Edit]:
    """The second of two updates takes first and second moments of the first one, swapped."""
    for one in updates(schedule):
        moments = of_role(one, Role.MOMENT)
        if len(moments) == 2:
            rest = [each for each in one.operands if each.role is not Role.MOMENT]
            new = again(with_operands(one, (*rest, *reversed(moments))))
            yield from one_by_one(schedule, [one], becomes(one, new), "again with moments swapped")


def casts(schedule: Schedule) -> list[Operation]:
    """What carries on what was updated: casts, gathers."""
    names = {
        each.view.buffer
        for update in updates(schedule)
        for each in update.operands
        if each.role in (Role.MASTER, Role.PARAMETER)
    }
    found: list[Operation] = []
    for each in in_step(schedule):
        if isinstance(each, Copy | AllGather) and each.source.buffer in names:
            names.add(each.target.buffer)
            found.append(each)
    return found


def carried_before_the_update(schedule: Schedule) -> Iterator[Edit]:
    for each in casts(schedule):
        source = cast("Copy", each).source.buffer
        for writer in writers(schedule, source)[:1]:
            yield from made(
                schedule,
                moves(each.id, before=writer.id),
                f"{each.id} before {writer.id}",
            )


def not_carried(schedule: Schedule) -> Iterator[Edit]:
    yield from one_by_one(schedule, casts(schedule), lambda _: (), "gone")


def half_updated(schedule: Schedule) -> Iterator[Edit]:
    for each in updates(schedule):
        try:
            less = resized(
                schedule, each, lambda view, _: replace(view, size=max(1, view.size // 2))
            )
        except ValueError:
            continue
        yield from one_by_one(schedule, [each], becomes(less), "half")


def not_updated(schedule: Schedule) -> Iterator[Edit]:
    yield from one_by_one(schedule, updates(schedule), lambda _: (), "gone")


def not_updated_by_one(schedule: Schedule) -> Iterator[Edit]:
    names = [each.id for each in updates(schedule)]
    yield from alone(schedule, drops(*names[:1]), f"no {names[:1]}")


def rate_of_one_rank(schedule: Schedule) -> Iterator[Edit]:
    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute) and each.action is Action.UPDATE and has_constant_rate(each):
            rule = cast("Any", each.rule)
            return (replace(each, rule=replace(rule, learning_rate=2 * rule.learning_rate)),)
        return (each,)

    yield from alone(schedule, lambda program: rewritten(program, change), "twice the rate")


def initial(value: float) -> Aim:
    """What set-up initializes is filled with a number."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        ones = [
            each
            for each in in_setup(schedule)
            if isinstance(each, Compute) and each.action is Action.INITIALIZE
        ]

        def fill(each: Operation) -> tuple[Operation, ...]:
            compute = cast("Compute", each)
            view = compute.operands[0].view
            return (Fill(id=compute.id, stream=compute.stream, target=view, value=value),)

        yield from one_by_one(schedule, ones, fill, f"is {value} at first")

    return aim


def counter(change: Callable[[SetScalar], tuple[SetScalar, ...]], text: str) -> Aim:
    """The host counts steps otherwise."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        yield from through(
            schedule,
            lambda each: (
                change(each) if isinstance(each, SetScalar) and each.scalar == "step" else None
            ),
            text,
        )

    return aim


def counted_late(schedule: Schedule) -> Iterator[Edit]:
    """The step is counted when all updates are issued."""
    last = updates(schedule)[-1:]
    for each in in_step(schedule):
        if isinstance(each, SetScalar) and each.scalar == "step" and last:
            yield from made(
                schedule,
                moves(each.id, after=last[0].id),
                "counted after updates",
            )


def counted_from_one(schedule: Schedule) -> Iterator[Edit]:
    found = tuple(
        replace(each, initial=1.0) if each.name == "step" else each for each in schedule.scalars
    )
    yield Edit("the first step is the second", replace(schedule, scalars=found))


def kept_in(kind: Kind, dtype: DType) -> Aim:
    """A buffer of the optimizer is kept in another format."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for program in schedule.programs[:1]:
            for buffer in program.buffers:
                if buffer.kind is kind and buffer.dtype in (DType.FP32, DType.FP64):
                    try:
                        found = in_format(schedule, {buffer.name}, dtype)
                    except ValueError:
                        continue
                    yield Edit(f"{buffer.name} in {dtype}", found)

    return aim


def without_the_last_wait(schedule: Schedule) -> Iterator[Edit]:
    """What reads a reduced gradient does not wait for its reduction."""
    reductions = {each.id for each in over_ranks(schedule)}
    waiting = [
        each
        for each in in_step(schedule)
        if reductions & {edge for edge in getattr(each, "after", ()) if isinstance(edge, str)}
    ]

    def unbound(each: Operation) -> tuple[Operation, ...]:
        old = cast("Compute", each)
        return (replace(old, after=tuple(edge for edge in old.after if edge not in reductions)),)

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
    "no Nesterov momentum": without_nesterov,
    "Adam without a step number": step_number(()),
    "Adam with the loss scale for a step number": step_number(("loss_scale",)),
    "Adam with good steps for a step number": step_number(("good_steps",)),
    "first moment begins at 1": moment_begins(0),
    "second moment begins at 1": moment_begins(1),
    "update twice": twice,
    "update twice at half the rate": twice_at_half_rate,
    "update again with moments swapped": moments_swapped_on_one,
    "moments of another update": of_another(Role.MOMENT),
    "gradient of another update": of_another(Role.GRADIENT),
    "cast or gather before the update": carried_before_the_update,
    "no cast or gather after the update": not_carried,
    "half of an update": half_updated,
    "no update": not_updated,
    "no update on one rank": not_updated_by_one,
    "another rate on one rank": rate_of_one_rank,
    "parameters begin at 0": initial(0.0),
    "parameters begin at 1": initial(1.0),
    "step counted twice": counter(lambda each: (replace(each, add=2.0),), "counts 2"),
    "step not counted": counter(lambda _: (), "not counted"),
    "step counted after updates": counted_late,
    "first step is the second": counted_from_one,
    "master in a poorer format": kept_in(Kind.MASTER, DType.BF16),
    "moment in a poorer format": kept_in(Kind.MOMENT, DType.FP16),
    "parameter in a poorer format": kept_in(Kind.PARAMETER, DType.FP8),
    "reduction is not waited for": without_the_last_wait,
}
