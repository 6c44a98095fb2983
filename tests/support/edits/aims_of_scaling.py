"""Named edits of loss scale, overflow, norm and clip."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

from edits.aim import (
    Aim,
    adds,
    again,
    alone,
    becomes,
    computes,
    drops,
    in_step,
    made,
    moves,
    of_role,
    one_by_one,
    through,
    with_operands,
)
from edits.programs import Edit, cleaned, moved
from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Branch,
    Compute,
    Fill,
    Operation,
    Reduction,
    Role,
    SetScalar,
    walk,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.optimizer_rule import ClipNorm


def action(chosen: Action, change: Callable[[Compute], tuple[Operation, ...]], text: str) -> Aim:
    """An operation that does `chosen` is another one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        yield from one_by_one(
            schedule,
            computes(schedule, chosen),
            lambda each: change(cast("Compute", each)),
            text,
        )

    return aim


def covering(chosen: Action, keep: Callable[[int, int], bool], text: str) -> Aim:
    """What measures gradients covers those alone that `keep` says, by number and count."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        def less(each: Operation) -> tuple[Operation, ...]:
            compute = cast("Compute", each)
            gradients = of_role(compute, Role.GRADIENT)
            kept = [
                operand
                for operand in compute.operands
                if operand.role is not Role.GRADIENT
                or keep(gradients.index(operand), len(gradients))
            ]
            return (with_operands(compute, kept),)

        several = [
            each for each in computes(schedule, chosen) if len(of_role(each, Role.GRADIENT)) > 1
        ]
        yield from one_by_one(schedule, several, less, text)

    return aim


def shorter(chosen: Action) -> Aim:
    """What measures gradients leaves out the last element of one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for each in computes(schedule, chosen):
            for number, operand in enumerate(each.operands):
                view = operand.view
                if operand.role is Role.GRADIENT and view.size > 1 and view.axis is None:
                    operands = list(each.operands)
                    operands[number] = replace(operand, view=replace(view, size=view.size - 1))
                    new = with_operands(each, operands)
                    yield from one_by_one(schedule, [each], becomes(new), "shorter")

    return aim


def counted_twice(schedule: Schedule) -> Iterator[Edit]:
    """A norm has one of its gradients twice."""

    def more(each: Operation) -> tuple[Operation, ...]:
        compute = cast("Compute", each)
        return (with_operands(compute, (compute.operands[0], *compute.operands)),)

    yield from one_by_one(schedule, computes(schedule, Action.NORM), more, "twice")


def numbers_reduced(schedule: Schedule, chosen: Action) -> list[AllReduce]:
    """Reductions of the number that operations of one action make."""
    flags = {
        operand.view.buffer
        for each in computes(schedule, chosen)
        for operand in of_role(each, Role.OUTPUT)
    }
    return [
        each
        for each in in_step(schedule)
        if isinstance(each, AllReduce) and each.source.buffer in flags
    ]


def number(chosen: Action, change: Callable[[AllReduce], tuple[Operation, ...]], text: str) -> Aim:
    """The reduction of a norm or of a flag is another one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        yield from one_by_one(
            schedule,
            numbers_reduced(schedule, chosen),
            lambda each: change(cast("AllReduce", each)),
            text,
        )

    return aim


def over_others(chosen: Action) -> Aim:
    """The reduction of a norm or of a flag is over other ranks."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for group in schedule.groups:
            yield from one_by_one(
                schedule,
                [each for each in numbers_reduced(schedule, chosen) if each.group != group.name],
                _over(group.name),
                f"over {group.name}",
            )

    return aim


def _over(group: str) -> Callable[[Operation], tuple[Operation, ...]]:
    return lambda each: (replace(cast("AllReduce", each), group=group),)


def too_early(chosen: Action) -> Aim:
    """Something is measured before the last thing that changes what it reads."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for each in computes(schedule, chosen):
            read = {access.view.buffer for access in accesses(each) if access.reads}
            before: list[str] = []
            for other in in_step(schedule):
                if other.id == each.id:
                    break
                if any(one.writes and one.view.buffer in read for one in accesses(other)):
                    before.append(other.id)
            for at in before[-2:]:
                yield from made(
                    schedule,
                    moves(each.id, before=at),
                    f"{each.id} before {at}",
                )

    return aim


def inverted(schedule: Schedule) -> Iterator[Edit]:
    """A host goes the other way."""
    yield from one_by_one(
        schedule,
        (each for each in in_step(schedule) if isinstance(each, Branch)),
        lambda each: (
            replace(
                cast("Branch", each),
                then=cast("Branch", each).otherwise,
                otherwise=cast("Branch", each).then,
            ),
        ),
        "inverted",
    )


def _never_skips(program: Program) -> Program:
    """The program that updates whatever a flag says."""
    found: list[Operation] = []
    for each in program.step:
        found.extend(each.otherwise if isinstance(each, Branch) else (each,))
    return cleaned(program, program.setup, tuple(found))


def never_skipped(schedule: Schedule) -> Iterator[Edit]:
    yield from made(schedule, _never_skips, "never skips")
    yield from alone(schedule, _never_skips, "never skips")


def on_both_sides(scalar: str) -> Aim:
    """What a host counts in steps that are taken it counts in those that are skipped, too."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        def change(program: Program) -> Program:
            for branch in walk(program.step):
                if isinstance(branch, Branch):
                    for each in branch.otherwise:
                        if isinstance(each, SetScalar) and each.scalar == scalar:
                            return moved(program, each.id, before=branch.id)
            return program

        yield from made(schedule, change, f"{scalar} before the branch")

    return aim


def scalar(
    name: str, change: Callable[[SetScalar], tuple[Operation, ...]], text: str, *, skips: bool
) -> Aim:
    """A host counts otherwise, where a step is skipped or where it is not."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for program in schedule.programs[:1]:
            for branch in walk(program.step):
                if isinstance(branch, Branch):
                    side = branch.then if skips else branch.otherwise
                    sets = [
                        each for each in side if isinstance(each, SetScalar) and each.scalar == name
                    ]
                    yield from one_by_one(
                        schedule, sets, lambda each: change(cast("SetScalar", each)), text
                    )

    return aim


def begins(name: str, change: Callable[[float], float]) -> Aim:
    """A number of the host begins otherwise."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        found = tuple(
            replace(each, initial=change(each.initial)) if each.name == name else each
            for each in schedule.scalars
        )
        if found != schedule.scalars:
            yield Edit(f"{name} begins otherwise", replace(schedule, scalars=found))

    return aim


def unscaled_slope(schedule: Schedule) -> Iterator[Edit]:
    """The slope of the loss is not scaled: in one micro-batch, in all, by a number that is not."""
    fills = [each for each in in_step(schedule) if isinstance(each, Fill) and each.scalar]
    yield from one_by_one(
        schedule, fills, lambda each: (replace(cast("Fill", each), scalar=None),), "not scaled"
    )
    yield from through(
        schedule,
        lambda each: (
            (replace(each, scalar=None),) if isinstance(each, Fill) and each.scalar else None
        ),
        "none is scaled",
    )


def grown_before_it_is_used(schedule: Schedule) -> Iterator[Edit]:
    """The loss scale grows before gradients are unscaled by it."""
    first = [each.id for each in computes(schedule, Action.UNSCALE)][:1]
    for each in in_step(schedule):
        if isinstance(each, SetScalar) and each.scalar == "loss_scale" and each.counter and first:

            def change(program: Program, name: str = each.id) -> Program:
                if not {name, first[0]} <= set(program.by_id):
                    return program
                counts = [
                    one.id
                    for one in walk(program.step)
                    if isinstance(one, SetScalar) and one.scalar == "good_steps" and one.add
                ]
                for one in (*counts, name):
                    program = moved(program, one, before=first[0])
                return program

            yield from made(schedule, change, f"{each.id} before {first[0]}")


def on_one_rank(chosen: Action) -> Aim:
    """One rank does not do what the others do."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for each in computes(schedule, chosen)[:2]:
            yield from alone(schedule, drops(each.id), f"no {each.id}")

    return aim


def zeroed(schedule: Schedule) -> Iterator[Edit]:
    """A flag is zero whatever was found."""
    for each in numbers_reduced(schedule, Action.FINITE):
        zero = Fill(
            id="edit/zero", stream=each.stream, after=(each.id,), target=each.target, value=0.0
        )
        yield from made(
            schedule,
            adds(zero, after=each.id),
            f"zero after {each.id}",
        )
        yield from alone(
            schedule,
            adds(replace(zero, after=each.after), before=each.id),
            f"zero before {each.id}",
        )


def _maximum(each: Compute) -> tuple[Operation, ...]:
    assert isinstance(each.rule, ClipNorm)
    return (replace(each, rule=replace(each.rule, maximum=2 * each.rule.maximum)),)


SCALING: dict[str, Aim] = {
    "flag covers one gradient": covering(Action.FINITE, lambda place, _: place == 0, "one"),
    "flag misses the last gradient": covering(
        Action.FINITE, lambda place, count: place < count - 1, "all but the last"
    ),
    "flag misses the last element": shorter(Action.FINITE),
    "norm misses a gradient": covering(Action.NORM, lambda place, _: place > 0, "not the first"),
    "norm misses the last element": shorter(Action.NORM),
    "norm counts a gradient twice": counted_twice,
    "norm too early": too_early(Action.NORM),
    "flag too early": too_early(Action.FINITE),
    "norm of this rank alone": number(Action.NORM, lambda _: (), "gone"),
    "norm reduced twice": number(Action.NORM, lambda each: (each, again(each)), "twice"),
    "norm a mean": number(
        Action.NORM, lambda each: (replace(each, reduction=Reduction.AVERAGE),), "mean"
    ),
    "norm the largest": number(
        Action.NORM, lambda each: (replace(each, reduction=Reduction.MAX),), "largest"
    ),
    "norm over other ranks": over_others(Action.NORM),
    "norm in bf16": number(
        Action.NORM, lambda each: (replace(each, accumulate=DType.BF16),), "in bf16"
    ),
    "flag of this rank alone": number(Action.FINITE, lambda _: (), "gone"),
    "flag over other ranks": over_others(Action.FINITE),
    "flag a sum": number(
        Action.FINITE, lambda each: (replace(each, reduction=Reduction.SUM),), "sum"
    ),
    "flag zeroed": zeroed,
    "flag not found on one rank": on_one_rank(Action.FINITE),
    "overflow branch inverted": inverted,
    "never skipped": never_skipped,
    "not unscaled": action(Action.UNSCALE, lambda _: (), "gone"),
    "unscaled twice": action(Action.UNSCALE, lambda each: (each, again(each)), "twice"),
    "unscaled by nothing": action(
        Action.UNSCALE, lambda each: (replace(each, scalars=()),), "by nothing"
    ),
    "unscaled by good steps": action(
        Action.UNSCALE, lambda each: (replace(each, scalars=("good_steps",)),), "by good steps"
    ),
    "not unscaled on one rank": on_one_rank(Action.UNSCALE),
    "slope of the loss not scaled": unscaled_slope,
    "not clipped": action(Action.CLIP, lambda _: (), "gone"),
    "clipped twice": action(Action.CLIP, lambda each: (each, again(each)), "twice"),
    "clipped at another norm": action(Action.CLIP, _maximum, "twice as much"),
    "clipped by a norm of scaled gradients": action(
        Action.CLIP, lambda each: (replace(each, scalars=()),), "scaled"
    ),
    "not clipped on one rank": on_one_rank(Action.CLIP),
    "step counted on overflow": on_both_sides("step"),
    "good steps counted on overflow": on_both_sides("good_steps"),
    "scale does not fall": scalar("loss_scale", lambda _: (), "stays", skips=True),
    "scale falls further": scalar(
        "loss_scale",
        lambda each: (replace(each, multiply=each.multiply / 2),),
        "falls further",
        skips=True,
    ),
    "scale falls below its least": scalar(
        "loss_scale", lambda each: (replace(each, minimum=0.0),), "no least", skips=True
    ),
    "scale never grows": scalar("loss_scale", lambda _: (), "never grows", skips=False),
    "scale grows at another interval": scalar(
        "loss_scale", lambda each: (replace(each, every=each.every + 1),), "later", skips=False
    ),
    "scale grows in every step": scalar(
        "loss_scale", lambda each: (replace(each, counter=None),), "always", skips=False
    ),
    "scale grows before it is used": grown_before_it_is_used,
    "good steps are not forgotten": scalar("good_steps", lambda _: (), "kept", skips=True),
    "skipped steps are not counted": scalar("skipped_steps", lambda _: (), "no", skips=True),
    "loss scale begins otherwise": begins("loss_scale", lambda scale: scale / 2),
    "good steps begin at 1": begins("good_steps", lambda _: 1.0),
}
