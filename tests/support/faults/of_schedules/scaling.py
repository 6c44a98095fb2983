"""Loss scale, overflow, norm and clip."""

from collections.abc import Callable, Iterator

from faults.changes import (
    Aim,
    Edit,
    Replace,
    Select,
    adds,
    alone,
    at,
    becomes,
    doubled,
    drops,
    gone,
    in_all,
    made,
    moves,
    of_kind,
    one_by_one,
)
from faults.fault import Mutant
from faults.schedules import cleaned, shifted
from faults.selections import computes, in_step, numbers_reduced, of_role, with_operands
from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    Branch,
    Compute,
    Fill,
    Operation,
    Reduction,
    Role,
    SetScalar,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.optimizer_rule import ClipNorm


def doing(action: Action) -> Select:
    return lambda schedule: computes(schedule, action)


def number(action: Action) -> Select:
    """Return the selection of reductions of a norm or of a flag."""
    return lambda schedule: numbers_reduced(schedule, action)


def sets(**fields: object) -> Replace:
    """Return the change of fields of an operation."""
    return lambda each: (replace(each, **fields),)


def covering(action: Action, keep: Callable[[int, int], bool], text: str) -> Aim:
    """Return the operator that measures the gradients that `keep` takes by number and count."""

    def less(each: Compute) -> tuple[Operation, ...]:
        gradients = of_role(each, Role.GRADIENT)
        kept = (
            operand
            for operand in each.operands
            if operand.role is not Role.GRADIENT or keep(gradients.index(operand), len(gradients))
        )
        return (with_operands(each, kept),)

    def several(schedule: Schedule) -> list[Compute]:
        return [
            each for each in computes(schedule, action) if len(of_role(each, Role.GRADIENT)) > 1
        ]

    return at(several, less, text)


def shorter(action: Action) -> Aim:
    """Return the operator that measures a gradient without its last element."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for each in computes(schedule, action):
            for place, operand in enumerate(each.operands):
                view = operand.view
                if operand.role is Role.GRADIENT and view.size > 1 and view.axis is None:
                    operands = list(each.operands)
                    operands[place] = replace(operand, view=replace(view, size=view.size - 1))
                    new = with_operands(each, operands)
                    yield from one_by_one(schedule, [each], becomes(new), "shorter")

    return aim


def over_others(action: Action) -> Aim:
    """Return the operator that reduces a norm or a flag over other ranks."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for group in schedule.groups:
            yield from one_by_one(
                schedule,
                [each for each in numbers_reduced(schedule, action) if each.group != group.name],
                sets(group=group.name),
                f"over {group.name}",
            )

    return aim


def too_early(action: Action) -> Aim:
    """Return the operator that measures before the last changes of what is measured."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for each in computes(schedule, action):
            read = {access.view.buffer for access in accesses(each) if access.reads}
            before: list[str] = []
            for other in in_step(schedule):
                if other.id == each.id:
                    break
                if any(one.writes and one.view.buffer in read for one in accesses(other)):
                    before.append(other.id)
            for place in before[-2:]:
                yield from made(schedule, moves(each.id, before=place), f"{each.id} before {place}")

    return aim


def _never_skips(program: Program) -> Program:
    """Return the program that updates whatever a flag says."""
    found: list[Operation] = []
    for each in program.step:
        found.extend(each.otherwise if isinstance(each, Branch) else (each,))
    return cleaned(program, program.setup, tuple(found))


def never_skipped(schedule: Schedule) -> Iterator[Edit]:
    yield from made(schedule, _never_skips, "never skips")
    yield from alone(schedule, _never_skips, "never skips")


def on_both_sides(scalar: str) -> Aim:
    """Return the operator that counts skipped steps as those that are done."""

    def change(program: Program) -> Program:
        for branch in walk(program.step):
            if isinstance(branch, Branch):
                for each in branch.otherwise:
                    if isinstance(each, SetScalar) and each.scalar == scalar:
                        return shifted(program, each.id, before=branch.id)
        return program

    return lambda schedule: made(schedule, change, f"{scalar} before the branch")


def setting(name: str, *, skips: bool) -> Select:
    """Return the selection of changes of a scalar where a step is skipped, or where it is not."""

    def select(schedule: Schedule) -> Iterator[SetScalar]:
        for branch in walk(schedule.programs[0].step):
            if isinstance(branch, Branch):
                for each in branch.then if skips else branch.otherwise:
                    if isinstance(each, SetScalar) and each.scalar == name:
                        yield each

    return select


def begins(name: str, change: Callable[[float], float]) -> Aim:
    """Return the operator that begins with another number of the host."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        found = tuple(
            replace(each, initial=change(each.initial)) if each.name == name else each
            for each in schedule.scalars
        )
        if found != schedule.scalars:
            yield Mutant.of(f"{name} begins otherwise", replace(schedule, scalars=found))

    return aim


def unscaled_slope(schedule: Schedule) -> Iterator[Edit]:
    """Do not scale the slope of the loss: in one micro-batch, in all."""

    def scaled(schedule: Schedule) -> list[Fill]:
        return [each for each in in_step(schedule) if isinstance(each, Fill) and each.scalar]

    yield from at(scaled, sets(scalar=None), "not scaled")(schedule)
    yield from in_all(scaled, sets(scalar=None), "not scaled")(schedule)


def grown_before_it_is_used(schedule: Schedule) -> Iterator[Edit]:
    """Let the loss scale grow before gradients are unscaled by it."""
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
                    program = shifted(program, one, before=first[0])
                return program

            yield from made(schedule, change, f"{each.id} before {first[0]}")


def on_one_rank(action: Action) -> Aim:
    """Return the operator that leaves an operation out on one rank."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for each in computes(schedule, action)[:2]:
            yield from alone(schedule, drops(each.id), f"no {each.id}")

    return aim


def zeroed(schedule: Schedule) -> Iterator[Edit]:
    """Set a flag to zero."""
    for each in numbers_reduced(schedule, Action.FINITE):
        zero = Fill(
            id="edit/zero", stream=each.stream, after=(each.id,), target=each.target, value=0.0
        )
        yield from made(schedule, adds(zero, after=each.id), f"zero after {each.id}")
        before = adds(replace(zero, after=each.after), before=each.id)
        yield from alone(schedule, before, f"zero before {each.id}")


def at_twice_the_norm(each: Compute) -> tuple[Operation, ...]:
    assert isinstance(each.rule, ClipNorm)
    return (replace(each, rule=replace(each.rule, maximum=2 * each.rule.maximum)),)


def inverted(each: Branch) -> tuple[Operation, ...]:
    return (replace(each, then=each.otherwise, otherwise=each.then),)


def with_the_first_twice(each: Compute) -> tuple[Operation, ...]:
    return (with_operands(each, (each.operands[0], *each.operands)),)


FINITE, NORM, CLIP, UNSCALE = Action.FINITE, Action.NORM, Action.CLIP, Action.UNSCALE
GROWS = setting("loss_scale", skips=False)
FALLS = setting("loss_scale", skips=True)
SCALING: dict[str, Aim] = {
    "flag covers one gradient": covering(FINITE, lambda place, _: place == 0, "one"),
    "flag misses the last gradient": covering(
        FINITE, lambda place, count: place < count - 1, "all but the last"
    ),
    "flag misses the last element": shorter(FINITE),
    "norm misses a gradient": covering(NORM, lambda place, _: place > 0, "not the first"),
    "norm misses the last element": shorter(NORM),
    "norm counts a gradient twice": at(doing(NORM), with_the_first_twice, "twice"),
    "norm too early": too_early(NORM),
    "flag too early": too_early(FINITE),
    "norm of this rank alone": at(number(NORM), gone, "gone"),
    "norm reduced twice": at(number(NORM), doubled, "twice"),
    "norm a mean": at(number(NORM), sets(reduction=Reduction.AVERAGE), "mean"),
    "norm the largest": at(number(NORM), sets(reduction=Reduction.MAX), "largest"),
    "norm over other ranks": over_others(NORM),
    "norm in bf16": at(number(NORM), sets(accumulate=DType.BF16), "in bf16"),
    "flag of this rank alone": at(number(FINITE), gone, "gone"),
    "flag over other ranks": over_others(FINITE),
    "flag a sum": at(number(FINITE), sets(reduction=Reduction.SUM), "sum"),
    "flag zeroed": zeroed,
    "flag not found on one rank": on_one_rank(FINITE),
    "overflow branch inverted": at(of_kind(Branch), inverted, "inverted"),
    "never skipped": never_skipped,
    "not unscaled": at(doing(UNSCALE), gone, "gone"),
    "unscaled twice": at(doing(UNSCALE), doubled, "twice"),
    "unscaled by nothing": at(doing(UNSCALE), sets(scalars=()), "by nothing"),
    "unscaled by good steps": at(doing(UNSCALE), sets(scalars=("good_steps",)), "by good steps"),
    "not unscaled on one rank": on_one_rank(UNSCALE),
    "slope of the loss not scaled": unscaled_slope,
    "not clipped": at(doing(CLIP), gone, "gone"),
    "clipped twice": at(doing(CLIP), doubled, "twice"),
    "clipped at another norm": at(doing(CLIP), at_twice_the_norm, "twice as much"),
    "clipped by a norm of scaled gradients": at(doing(CLIP), sets(scalars=()), "scaled"),
    "not clipped on one rank": on_one_rank(CLIP),
    "step counted on overflow": on_both_sides("step"),
    "good steps counted on overflow": on_both_sides("good_steps"),
    "scale does not fall": at(FALLS, gone, "stays"),
    "scale falls further": at(
        FALLS, lambda each: (replace(each, multiply=each.multiply / 2),), "falls further"
    ),
    "scale falls below its least": at(FALLS, sets(minimum=0.0), "no least"),
    "scale never grows": at(GROWS, gone, "never grows"),
    "scale grows at another interval": at(
        GROWS, lambda each: (replace(each, every=each.every + 1),), "later"
    ),
    "scale grows in every step": at(GROWS, sets(counter=None), "always"),
    "scale grows before it is used": grown_before_it_is_used,
    "good steps are not forgotten": at(setting("good_steps", skips=True), gone, "kept"),
    "skipped steps are not counted": at(setting("skipped_steps", skips=True), gone, "no"),
    "loss scale begins otherwise": begins("loss_scale", lambda scale: scale / 2),
    "good steps begin at 1": begins("good_steps", lambda _: 1.0),
}
