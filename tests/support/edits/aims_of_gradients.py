"""Named edits of how gradients come about: what is loaded, added up, divided, reduced over whom."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import cast

from edits.aim import (
    Aim,
    adds,
    again,
    alone,
    becomes,
    computes,
    contributions,
    in_step,
    inside_units,
    made,
    of_role,
    one_by_one,
    over_ranks,
    through,
    with_operands,
)
from edits.programs import Edit, added, dropped, replaced, rewritten, with_buffer
from edits.roles import doubled
from edits.shape import in_format
from zsim.dtype import DType
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    ReduceScatter,
    Reduction,
    Role,
    View,
)
from zsim.schedule.schedule import Buffer, Kind, Program, Schedule


def loads(schedule: Schedule) -> list[Compute]:
    """Operations that load a micro-batch."""
    return computes(schedule, Action.LOAD)


def loaded_twice(schedule: Schedule) -> Iterator[Edit]:
    """Another micro-batch is the first one again."""
    later = [each for each in loads(schedule) if each.micro_batch]
    yield from one_by_one(
        schedule, later, lambda each: (replace(cast("Compute", each), micro_batch=0),), "again"
    )


def contribution(change: Callable[[Copy], tuple[Operation, ...]], text: str, *, adds: bool) -> Aim:
    """A copy on the way of a gradient is another one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        chosen = [each for each in contributions(schedule) if each.accumulate or not adds]
        yield from one_by_one(schedule, chosen, lambda each: change(cast("Copy", each)), text)

    return aim


def of_another_micro_batch(schedule: Schedule) -> Iterator[Edit]:
    """A gradient of one micro-batch counts twice, that of another not."""
    found = contributions(schedule)
    for one in found:
        for other in found:
            if other.accumulate and one.target == other.target and one.id != other.id:

                def change(program: Program, one: Copy = one, other: Copy = other) -> Program:
                    if not {one.id, other.id} <= set(program.by_id):
                        return program
                    less = replace(other, accumulate=one.accumulate)
                    whole = replaced(program, other.id, less, again(other))
                    return dropped(whole, one.id)

                yield from made(schedule, change, f"{other.id} twice, {one.id} not")


def skipped_and_doubled(schedule: Schedule) -> Iterator[Edit]:
    """One rank brings its gradient twice, another one nothing."""
    for reduction in over_ranks(schedule)[:3]:
        stream, view = reduction.stream, reduction.source
        zero = Fill(id="edit/zero", stream=stream, after=reduction.after, target=view, value=0.0)
        more = replace(cast("Copy", doubled("edit/more", stream, view)), after=reduction.after)

        twice, nothing = adds(more, before=reduction.id), adds(zero, before=reduction.id)
        for text, change in (("twice", twice), ("nothing", nothing)):
            yield from alone(schedule, change, f"{text} to {reduction.id}")
        for one in alone(schedule, twice, "twice"):
            roles = [each.role for each in one.schedule.programs]
            rest = [
                nothing(each) if each.role == roles[-1] else each for each in one.schedule.programs
            ]
            yield Edit(f"{one.text}, others nothing", replace(one.schedule, programs=tuple(rest)))


def _divides(names: set[str], division: Copy, at: str) -> Callable[[Program], Program]:
    """What takes divisors out of copies, and puts a division behind a reduction."""

    def undivided(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Copy) and each.id in names:
            return (replace(each, divisor=1),)
        return (each,)

    return lambda program: added(rewritten(program, undivided), division, after=at)


def divided_late(schedule: Schedule) -> Iterator[Edit]:
    """One rank divides what was reduced, not what it brings."""
    for reduction in over_ranks(schedule):
        divisors = [
            each
            for each in contributions(schedule)
            if each.divisor > 1
            and reduction.source.buffer in (each.source.buffer, each.target.buffer)
        ]
        if not divisors:
            continue
        names = {each.id for each in divisors}
        after = Copy(
            id="edit/divide",
            stream=reduction.stream,
            source=reduction.target,
            target=reduction.target,
            divisor=divisors[0].divisor,
        )

        change = _divides(names, after, reduction.id)
        yield from alone(schedule, change, f"divides after {reduction.id}")


def other_groups(schedule: Schedule) -> Iterator[Edit]:
    """Gradients are reduced over other ranks: in one reduction, and in all."""
    reductions = over_ranks(schedule)
    for group in schedule.groups:
        for chosen in ([each] for each in reductions[:3]):
            yield from _over(schedule, group.name, {each.id for each in chosen})
        yield from _over(schedule, group.name, {each.id for each in reductions})


def _over(schedule: Schedule, group: str, names: set[str]) -> Iterator[Edit]:
    yield from through(
        schedule,
        lambda each: (
            (replace(each, group=group),)
            if isinstance(each, AllReduce | ReduceScatter) and each.id in names
            else None
        ),
        f"{len(names)} reductions over {group}",
    )


def reduction(
    change: Callable[[AllReduce | ReduceScatter], tuple[Operation, ...]], text: str
) -> Aim:
    """A reduction over ranks is another one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        yield from one_by_one(
            schedule,
            over_ranks(schedule),
            lambda each: change(cast("AllReduce", each)),
            text,
        )

    return aim


def other_reduction(each: AllReduce | ReduceScatter) -> tuple[Operation, ...]:
    """A mean for a sum, a sum for a mean."""
    other = Reduction.AVERAGE if each.reduction is Reduction.SUM else Reduction.SUM
    return (replace(each, reduction=other),)


def added_in(dtype: DType) -> Aim:
    """Ranks are added up in another format."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        yield from one_by_one(
            schedule,
            [each for each in over_ranks(schedule) if each.accumulate is not dtype],
            lambda each: (replace(cast("AllReduce", each), accumulate=dtype),),
            f"adds in {dtype}",
        )

    return aim


def kept_in(dtype: DType) -> Aim:
    """Gradients are kept, and sent, in another format."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        targets = {each.target.buffer for each in contributions(schedule)}
        for name in sorted(targets):
            try:
                yield Edit(f"{name} in {dtype}", in_format(schedule, {name}, dtype))
            except ValueError:
                continue

    return aim


def on_a_scratch_copy(schedule: Schedule) -> Iterator[Edit]:
    """Ranks that share the work add up a copy that nobody reads; no view is marked as a summand."""
    for each in inside_units(schedule):

        def change(program: Program, name: str = each.id) -> Program:
            one = program.by_id.get(name)  # roles have buffers of their own
            if not isinstance(one, AllReduce):
                return program
            view = one.source
            like = program.by_name[view.buffer]
            scratch = Buffer(
                name="edit/scratch",
                pool=like.pool,
                elements=view.size,
                dtype=like.dtype,
                kind=Kind.WORKSPACE,
                home=one.stream,
            )
            own = View(buffer=scratch.name, size=view.size)
            parts: tuple[Operation, ...] = (
                Allocate(id="edit/allocate", buffer=scratch.name),
                Copy(id="edit/copy", stream=one.stream, after=one.after, source=view, target=own),
                replace(one, after=(), source=own, target=own),
                Free(id="edit/free", buffer=scratch.name),
            )
            return _unmarked(replaced(with_buffer(program, scratch), one.id, *parts), view.buffer)

        yield from made(schedule, change, f"{each.id} on a copy")


def _unmarked(program: Program, buffer: str) -> Program:
    """The program in which no operand in a buffer is a summand."""

    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute):
            operands = [
                replace(one, partial=()) if one.view.buffer == buffer else one
                for one in each.operands
            ]
            return (with_operands(each, operands),)
        return (each,)

    return rewritten(program, change)


def within(change: Callable[[AllReduce], tuple[Operation, ...]], text: str) -> Aim:
    """An all-reduce of ranks that share the work is another one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        yield from one_by_one(
            schedule, inside_units(schedule), lambda each: change(cast("AllReduce", each)), text
        )

    return aim


def _neither(name: str, buffer: str) -> Callable[[Program], Program]:
    """What takes an operation out of a program, and marks of summands in a buffer."""
    return lambda program: _unmarked(dropped(program, name), buffer)


def unmarked_everywhere(schedule: Schedule) -> Iterator[Edit]:
    """What ranks that share the work should add up is neither added up nor marked."""
    for one in inside_units(schedule):
        yield from made(
            schedule,
            _neither(one.id, one.source.buffer),
            f"no {one.id}, no mark",
        )


def fills(*, zero: bool) -> list[Callable[[Operation], tuple[Operation, ...]]]:
    """What is made of fills: of those with zero, and of the others."""
    if zero:
        return [becomes(), lambda each: (replace(cast("Fill", each), value=1.0),)]
    return [lambda each: (replace(cast("Fill", each), value=2 * cast("Fill", each).value),)]


def filled(*, zero: bool) -> Aim:
    """Padding and accumulators are not zero; a slope of the loss is not one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        chosen = [
            each
            for each in in_step(schedule)
            if isinstance(each, Fill) and (each.value == 0) is zero
        ]
        for change in fills(zero=zero):
            yield from one_by_one(schedule, chosen, change, "filled")

    return aim


def gradients_of_a_sister(schedule: Schedule) -> Iterator[Edit]:
    """Two gradients of one backward that are alike in size take each other's place."""
    for backward in computes(schedule, Action.BACKWARD):
        gradients = of_role(backward, Role.GRADIENT)
        for one, other in pairwise(gradients):
            if one.view.size == other.view.size and one.view != other.view:
                swap = {one: other, other: one}
                new = with_operands(backward, (swap.get(each, each) for each in backward.operands))
                yield from one_by_one(schedule, [backward], becomes(new), "swapped")


def freed_early(schedule: Schedule) -> Iterator[Edit]:
    """A free does not wait for uses on other streams."""
    frees = [each for each in in_step(schedule) if isinstance(each, Free) and each.uses]
    yield from one_by_one(
        schedule, frees, lambda each: (replace(cast("Free", each), uses=()),), "waits for nothing"
    )


def copies_of_layouts(schedule: Schedule) -> Iterator[Edit]:
    """Layouts do not say which parameters ranks have copies of."""
    found = tuple(
        replace(each, pieces=tuple(replace(piece, copies=()) for piece in each.pieces))
        for each in schedule.layouts
    )
    if found != schedule.layouts:
        yield Edit("no copies", replace(schedule, layouts=found))
    for number, layout in enumerate(schedule.layouts):
        for place, piece in enumerate(layout.pieces):
            pieces = list(layout.pieces)
            pieces[place] = replace(piece, copies=() if piece.copies else ("tensor",))
            if schedule.mesh.size > 1 and "tensor" in {axis.name for axis in schedule.mesh.axes}:
                some = list(schedule.layouts)
                some[number] = replace(layout, pieces=tuple(pieces))
                yield Edit(f"copies of {piece.parameter}", replace(schedule, layouts=tuple(some)))


def pieces_swapped(schedule: Schedule) -> Iterator[Edit]:
    """Two parameters of a layout that are alike in size stand in each other's place."""
    for number, layout in enumerate(schedule.layouts):
        for place, (one, other) in enumerate(pairwise(layout.pieces)):
            if one.size == other.size and one.size:
                pieces = list(layout.pieces)
                pieces[place] = replace(one, parameter=other.parameter)
                pieces[place + 1] = replace(other, parameter=one.parameter)
                some = list(schedule.layouts)
                some[number] = replace(layout, pieces=tuple(pieces))
                yield Edit(
                    f"{one.parameter} and its neighbour", replace(schedule, layouts=tuple(some))
                )


GRADIENTS: dict[str, Aim] = {
    "micro-batch loaded twice": loaded_twice,
    "gradient of another micro-batch": of_another_micro_batch,
    "contribution missing": contribution(lambda _: (), "gone", adds=True),
    "contribution twice": contribution(lambda each: (each, again(each)), "twice", adds=True),
    "overwritten instead of added": contribution(
        lambda each: (replace(each, accumulate=not each.accumulate),), "overwrites", adds=True
    ),
    "added instead of written": contribution(
        lambda each: (replace(each, accumulate=not each.accumulate),), "adds", adds=False
    ),
    "not divided": contribution(lambda each: (replace(each, divisor=1),), "undivided", adds=False),
    "divided twice": contribution(
        lambda each: (replace(each, divisor=2 * each.divisor),), "divided", adds=False
    ),
    "one rank twice, others nothing": skipped_and_doubled,
    "one rank divides after the reduction": divided_late,
    "reduced over other ranks": other_groups,
    "mean for a sum": reduction(other_reduction, "mean or sum"),
    "no reduction": reduction(lambda _: (), "gone"),
    "reduced twice": reduction(lambda each: (each, again(each)), "twice"),
    "ranks added up in bf16": added_in(DType.BF16),
    "ranks added up in fp16": added_in(DType.FP16),
    "gradients kept in bf16": kept_in(DType.BF16),
    "gradients kept in fp8": kept_in(DType.FP8),
    "tensor ranks add up a scratch copy": on_a_scratch_copy,
    "tensor ranks add up nothing": within(lambda _: (), "gone"),
    "tensor ranks add up nothing, unmarked": unmarked_everywhere,
    "tensor ranks add up twice": within(lambda each: (each, again(each)), "twice"),
    "tensor ranks take a mean": within(
        lambda each: (replace(each, reduction=Reduction.AVERAGE),), "mean"
    ),
    "padding or accumulator not zeroed": filled(zero=True),
    "slope of the loss doubled": filled(zero=False),
    "gradients of a backward swapped": gradients_of_a_sister,
    "free waits for nothing": freed_early,
    "copies of a layout": copies_of_layouts,
    "pieces of a layout swapped": pieces_swapped,
}
