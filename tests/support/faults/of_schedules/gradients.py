"""How gradients come about: what is loaded, added up, divided, reduced, and over whom."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from faults.changes import (
    Aim,
    Edit,
    Replace,
    adds,
    alone,
    at,
    becomes,
    doubled,
    gone,
    in_all,
    made,
    of_kind,
    one_by_one,
)
from faults.fault import Mutant
from faults.of_schedules.shapes import in_format
from faults.schedules import (
    ProgramChange,
    added,
    again,
    dropped,
    replaced,
    rewritten,
    with_buffer,
)
from faults.selections import (
    computes,
    contributions,
    in_step,
    inside_units,
    of_role,
    over_ranks,
    with_operands,
)
from zsim.dtype import DType
from zsim.schedule.layout import Layout, Piece
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
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Kind, Program, Schedule


def later_loads(schedule: Schedule) -> list[Compute]:
    return [each for each in computes(schedule, Action.LOAD) if each.micro_batch]


def summands(schedule: Schedule) -> list[Copy]:
    return [each for each in contributions(schedule) if each.accumulate]


def of_another_micro_batch(schedule: Schedule) -> Iterator[Edit]:
    """Count the gradient of one micro-batch twice, and that of another not at all."""
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
    """Add one rank's gradient twice, and nothing of another one."""
    for reduction in over_ranks(schedule)[:3]:
        stream, view, after = reduction.stream, reduction.source, reduction.after
        zero = Fill(id="edit/zero", stream=stream, after=after, target=view, value=0.0)
        more = Copy(
            id="edit/more", stream=stream, after=after, source=view, target=view, accumulate=True
        )

        twice, nothing = adds(more, before=reduction.id), adds(zero, before=reduction.id)
        for text, change in (("twice", twice), ("nothing", nothing)):
            yield from alone(schedule, change, f"{text} to {reduction.id}")
        for one in alone(schedule, twice, "twice"):
            roles = [each.role for each in one.made.programs]
            rest = [nothing(each) if each.role == roles[-1] else each for each in one.made.programs]
            programs = tuple(rest)
            yield Mutant.of(f"{one.text}, others nothing", replace(one.made, programs=programs))


def divides_after(
    reduction: AllReduce | ReduceScatter, names: Iterable[str], divisor: int
) -> ProgramChange:
    """Return the change that divides after a reduction, instead of in the copies `names`."""
    division = Copy(
        id="edit/divide",
        stream=reduction.stream,
        source=reduction.target,
        target=reduction.target,
        divisor=divisor,
    )

    def undivided(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Copy) and each.id in names:
            return (replace(each, divisor=1),)
        return (each,)

    return lambda program: added(rewritten(program, undivided), division, after=reduction.id)


def divided_late(schedule: Schedule) -> Iterator[Edit]:
    """Divide the sum on one rank, not its summand."""
    for reduction in over_ranks(schedule):
        divisors = [
            each
            for each in contributions(schedule)
            if each.divisor > 1
            and reduction.source.buffer in (each.source.buffer, each.target.buffer)
        ]
        if divisors:
            names = {each.id for each in divisors}
            change = divides_after(reduction, names, divisors[0].divisor)
            yield from alone(schedule, change, f"divides after {reduction.id}")


def other_groups(schedule: Schedule) -> Iterator[Edit]:
    """Reduce gradients over other ranks: in one reduction, and in all."""
    reductions = over_ranks(schedule)
    for group in schedule.groups:
        for chosen in (*([each] for each in reductions[:3]), reductions):
            yield from _over(group.name, {each.id for each in chosen})(schedule)


def _over(group: str, names: set[str]) -> Aim:
    return in_all(
        lambda schedule: [each for each in over_ranks(schedule) if each.id in names],
        lambda each: (replace(each, group=group),),
        f"over {group}",
    )


def other_reduction(each: AllReduce | ReduceScatter) -> tuple[Operation, ...]:
    """Return a mean for a sum, and a sum for a mean."""
    other = Reduction.AVERAGE if each.reduction is Reduction.SUM else Reduction.SUM
    return (replace(each, reduction=other),)


def added_in(dtype: DType) -> Aim:
    """Return the operator that adds ranks up in another format."""

    def richer(schedule: Schedule) -> list[AllReduce | ReduceScatter]:
        return [each for each in over_ranks(schedule) if each.accumulate is not dtype]

    return at(richer, lambda each: (replace(each, accumulate=dtype),), f"adds in {dtype}")


def kept_in(dtype: DType) -> Aim:
    """Return the operator that keeps, and sends, gradients in another format."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for name in sorted({each.target.buffer for each in contributions(schedule)}):
            yield from in_format(schedule, {name}, dtype)

    return aim


def on_a_scratch_copy(schedule: Schedule) -> Iterator[Edit]:
    """Add up a copy that nobody reads among ranks that share the work; mark no summand."""
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
    """Return the program in which no operand in a buffer is a summand."""

    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute):
            operands = (
                replace(one, partial=()) if one.view.buffer == buffer else one
                for one in each.operands
            )
            return (with_operands(each, operands),)
        return (each,)

    return rewritten(program, change)


def unmarked_everywhere(schedule: Schedule) -> Iterator[Edit]:
    """Neither add up nor mark the summands of ranks that share the work."""

    def neither(one: AllReduce) -> ProgramChange:
        return lambda program: _unmarked(dropped(program, one.id), one.source.buffer)

    for one in inside_units(schedule):
        yield from made(schedule, neither(one), f"no {one.id}, no mark")


def padding_not_zero(schedule: Schedule) -> Iterator[Edit]:
    chosen = [each for each in of_kind(Fill)(schedule) if isinstance(each, Fill) and not each.value]
    yield from one_by_one(schedule, chosen, gone, "gone")
    yield from one_by_one(schedule, chosen, lambda each: (replace(each, value=1.0),), "one")


def slopes(schedule: Schedule) -> list[Fill]:
    return [each for each in in_step(schedule) if isinstance(each, Fill) and each.value]


def gradients_of_a_sister(schedule: Schedule) -> Iterator[Edit]:
    """Exchange two gradients of one backward that are alike in size."""
    for backward in computes(schedule, Action.BACKWARD):
        for one, other in pairwise(of_role(backward, Role.GRADIENT)):
            if one.view.size == other.view.size and one.view != other.view:
                swap = {one: other, other: one}
                new = with_operands(backward, (swap.get(each, each) for each in backward.operands))
                yield from one_by_one(schedule, [backward], becomes(new), "swapped")


def waiting_frees(schedule: Schedule) -> list[Free]:
    return [each for each in in_step(schedule) if isinstance(each, Free) and each.uses]


def with_pieces(schedule: Schedule, layout: Layout, pieces: dict[int, Piece]) -> Schedule:
    """Return the schedule with other pieces at some places of a layout."""
    new = tuple(pieces.get(place, each) for place, each in enumerate(layout.pieces))
    changed = replace(layout, pieces=new)
    layouts = tuple(changed if each is layout else each for each in schedule.layouts)
    return replace(schedule, layouts=layouts)


def copies_of_layouts(schedule: Schedule) -> Iterator[Edit]:
    """Do not say in layouts which parameters ranks have copies of."""
    found = tuple(
        replace(each, pieces=tuple(replace(piece, copies=()) for piece in each.pieces))
        for each in schedule.layouts
    )
    if found != schedule.layouts:
        yield Mutant.of("no copies", replace(schedule, layouts=found))
    if schedule.mesh.size == 1 or all(axis.name != "tensor" for axis in schedule.mesh.axes):
        return
    for layout in schedule.layouts:
        for place, piece in enumerate(layout.pieces):
            other = replace(piece, copies=() if piece.copies else ("tensor",))
            some = with_pieces(schedule, layout, {place: other})
            yield Mutant.of(f"copies of {piece.parameter}", some)


def pieces_swapped(schedule: Schedule) -> Iterator[Edit]:
    """Exchange two parameters of a layout that are alike in size."""
    for layout in schedule.layouts:
        for place, (one, other) in enumerate(pairwise(layout.pieces)):
            if one.size == other.size and one.size:
                pieces = {
                    place: replace(one, parameter=other.parameter),
                    place + 1: replace(other, parameter=one.parameter),
                }
                text = f"{one.parameter} and its neighbour"
                yield Mutant.of(text, with_pieces(schedule, layout, pieces))


def accumulates_otherwise(each: Copy) -> tuple[Operation, ...]:
    return (replace(each, accumulate=not each.accumulate),)


def divides_by(change: Callable[[int], int]) -> Replace:
    return lambda each: (replace(each, divisor=change(each.divisor)),)


GRADIENTS: dict[str, Aim] = {
    "micro-batch loaded twice": at(
        later_loads, lambda each: (replace(each, micro_batch=0),), "again"
    ),
    "gradient of another micro-batch": of_another_micro_batch,
    "contribution missing": at(summands, gone, "gone"),
    "contribution twice": at(summands, doubled, "twice"),
    "overwritten instead of added": at(summands, accumulates_otherwise, "overwrites"),
    "added instead of written": at(contributions, accumulates_otherwise, "adds"),
    "not divided": at(contributions, divides_by(lambda _: 1), "undivided"),
    "divided twice": at(contributions, divides_by(lambda divisor: 2 * divisor), "divided"),
    "one rank twice, others nothing": skipped_and_doubled,
    "one rank divides after the reduction": divided_late,
    "reduced over other ranks": other_groups,
    "mean for a sum": at(over_ranks, other_reduction, "mean or sum"),
    "no reduction": at(over_ranks, gone, "gone"),
    "reduced twice": at(over_ranks, doubled, "twice"),
    "ranks added up in bf16": added_in(DType.BF16),
    "ranks added up in fp16": added_in(DType.FP16),
    "gradients kept in bf16": kept_in(DType.BF16),
    "gradients kept in fp8": kept_in(DType.FP8),
    "tensor ranks add up a scratch copy": on_a_scratch_copy,
    "tensor ranks add up nothing": at(inside_units, gone, "gone"),
    "tensor ranks add up nothing, unmarked": unmarked_everywhere,
    "tensor ranks add up twice": at(inside_units, doubled, "twice"),
    "tensor ranks take a mean": at(
        inside_units, lambda each: (replace(each, reduction=Reduction.AVERAGE),), "mean"
    ),
    "padding or accumulator not zeroed": padding_not_zero,
    "slope of the loss doubled": at(
        slopes, lambda each: (replace(each, value=2 * each.value),), "doubled"
    ),
    "gradients of a backward swapped": gradients_of_a_sister,
    "free waits for nothing": at(
        waiting_frees, lambda each: (replace(each, uses=()),), "waits for nothing"
    ),
    "copies of a layout": copies_of_layouts,
    "pieces of a layout swapped": pieces_swapped,
}
