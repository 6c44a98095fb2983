"""Places and formats: layouts, the parts that operations act on, formats of numbers."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant, one_of
from faults.of_schedules.fields import put, slots
from faults.of_schedules.insertions import of_step
from faults.schedules import everywhere, replaced, rewritten, with_program
from zsim.dtype import DType
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Broadcast,
    Communication,
    Compute,
    Operation,
    ReduceScatter,
    Role,
    Together,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule


def with_layout(schedule: Schedule, layout: Layout) -> Schedule:
    """Return the schedule with another layout of the same name."""
    found = tuple(layout if each.name == layout.name else each for each in schedule.layouts)
    return replace(schedule, layouts=found)


def layouts(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Move the pieces, names, copies, cuts or blocks of a layout."""
    layout = one_of(rng, schedule.layouts)
    kind = int(rng.integers(7))
    if kind == 0 and layout.axis is not None and layout.blocks is None:
        made = replace(layout, cuts=_cuts(schedule, layout, rng))
    elif kind == 1 and layout.blocks is not None:
        blocks = list(layout.blocks)
        blocks[int(rng.integers(len(blocks)))] += int(rng.integers(-2, 3))
        made = replace(layout, blocks=tuple(blocks))
    else:
        made = replace(layout, pieces=_pieces(schedule, layout, rng))
    if made == layout:
        raise ValueError("the same")
    return Mutant.of(f"{made}", with_layout(schedule, made))


def _cuts(schedule: Schedule, layout: Layout, rng: np.random.Generator) -> tuple[int, ...]:
    assert layout.axis is not None
    count = schedule.mesh.axis_size(layout.axis)
    size = layout.elements // count
    cuts = list(layout.cuts or (size * place for place in range(count + 1)))
    if len(cuts) > 2:
        cuts[int(rng.integers(1, len(cuts) - 1))] += int(one_of(rng, (-2, -1, 1, 2)))
    return tuple(cuts)


def _pieces(schedule: Schedule, layout: Layout, rng: np.random.Generator) -> tuple[Piece, ...]:
    pieces = list(layout.pieces)
    number = int(rng.integers(len(pieces))) if pieces else 0
    piece = one_of(rng, pieces[number : number + 1])
    match int(rng.integers(5)):
        case 0:
            other = int(rng.integers(len(pieces)))
            swapped = piece.parameter, pieces[other].parameter
            pieces[number] = replace(piece, parameter=swapped[1])
            pieces[other] = replace(pieces[other], parameter=swapped[0])
        case 1:
            pieces[number] = replace(piece, start=piece.start + int(one_of(rng, (-1, 1, 2))))
        case 2:
            pieces[number] = replace(piece, size=piece.size + int(one_of(rng, (-1, 1))))
        case 3:
            axes = [axis.name for axis in schedule.mesh.axes]
            choices = [(), *((axis,) for axis in axes), tuple(axes)]
            pieces[number] = replace(piece, copies=one_of(rng, choices))
        case _:
            names = [each.name for each in schedule.contract.parameters]
            pieces[number] = replace(piece, parameter=one_of(rng, names))
    return tuple(pieces)


def buffers(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Give a buffer another layout, shard, format or kind."""
    program = one_of(rng, schedule.programs)
    buffer = one_of(rng, program.buffers)
    field = one_of(rng, ("layout", "shard", "dtype", "kind", "produced"))
    known = [getattr(each, field) for each in program.buffers]
    values = {each for each in known if each != getattr(buffer, field)}
    made = replace(buffer, **{field: one_of(rng, sorted(values, key=str))})
    found = tuple(made if each is buffer else each for each in program.buffers)
    return Mutant.of(
        f"{buffer.name}: {field} {getattr(made, field)}",
        with_program(schedule, replace(program, buffers=found)),
    )


def views_of(operation: Operation) -> list[tuple[tuple[str | int, ...], View]]:
    """Return views inside an operation, with their paths."""
    return [(path, inside) for path, _, inside in slots(operation) if isinstance(inside, View)]


def _trim(by: int) -> Callable[[View, int], View]:
    return lambda view, times: replace(view, size=view.size - by * times)


def _late(by: int) -> Callable[[View, int], View]:
    return lambda view, times: replace(
        view, start=view.start + by * times, size=view.size - by * times
    )


def _shift(by: int) -> Callable[[View, int], View]:
    return lambda view, times: replace(view, start=view.start + by * times)


CUTS = (_trim(1), _trim(2), _late(1), _shift(1), _shift(-1), _trim(-1))


def times_of(schedule: Schedule, operation: Operation) -> dict[str, int]:
    """Return how many times as large one view of a collective is as the other."""
    if isinstance(operation, AllGather | ReduceScatter):
        count = schedule.group_by_name[operation.group].size(schedule.mesh)
        return {"target" if isinstance(operation, AllGather) else "source": count}
    return {}


def resized(
    schedule: Schedule, operation: Operation, cut: Callable[[View, int], View]
) -> Operation:
    """Return the operation with all of its views of several elements cut alike."""
    times = times_of(schedule, operation)
    made: object = operation
    for path, view in views_of(operation):
        if view.size > 1:
            made = put(made, path, cut(view, times.get(str(path[-1]), 1)))
    if made == operation:
        raise ValueError("the same")
    return cast("Operation", made)


def coverage(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Let an operation act on less, on more, or on its neighbours, with one view or with all."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, (each for each in of_step(program) if views_of(each)))
    cut = one_of(rng, CUTS)
    if rng.random() < 0.5:
        made = resized(schedule, operation, cut)
    else:
        path, view = one_of(rng, views_of(operation))
        made = cast("Operation", put(operation, path, cut(view, 1)))
    return Mutant.of(f"{made}", with_program(schedule, replaced(program, operation.id, made)))


COVERING = (Action.NORM, Action.FINITE, Action.CLIP, Action.UNSCALE, Action.UPDATE)


def operands(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Leave out an operand at the end of a step, or take it twice, or a part of it."""
    program = one_of(rng, schedule.programs)
    ending = [
        each for each in of_step(program) if isinstance(each, Compute) and each.action in COVERING
    ]
    operation = one_of(rng, ending)
    number = int(rng.integers(len(operation.operands)))
    operand = operation.operands[number]
    view = operand.view
    half = view.size // 2
    parts = [
        replace(operand, view=replace(view, size=half)),
        replace(operand, view=replace(view, start=view.start + half, size=view.size - half)),
    ]
    if view.axis is not None or view.layout is not None or operand.role is Role.OUTPUT:
        parts = [operand, operand]
    one = one_of(rng, ([], [operand, operand], parts[:1], parts[1:], parts))
    made = replace(
        operation, operands=(*operation.operands[:number], *one, *operation.operands[number + 1 :])
    )
    return Mutant.of(
        f"{operation.id}: {operand.role} of {view.buffer} as {[each.view for each in one]}",
        with_program(schedule, replaced(program, operation.id, made)),
    )


FLOATS = (DType.FP8, DType.FP16, DType.BF16, DType.FP32, DType.FP64)


def members_of(operation: Operation) -> Iterator[Communication]:
    """Yield the collectives of an operation."""
    if isinstance(operation, Together):
        yield from operation.members
    elif isinstance(operation, AllGather | AllReduce | ReduceScatter | Broadcast):
        yield operation


def formats(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Add up, send or keep something in another format, wherever it has to agree."""
    program = one_of(rng, schedule.programs)
    dtype = one_of(rng, FLOATS)
    if rng.random() < 0.5:
        reductions = [
            each for each in of_step(program) if isinstance(each, AllReduce | ReduceScatter)
        ]
        operation = one_of(rng, reductions)
        if operation.accumulate is dtype:
            raise ValueError("the same")
        name = operation.id
        made = everywhere(
            schedule,
            lambda each: (
                replaced(each, name, replace(operation, accumulate=dtype))
                if name in each.by_id
                else each
            ),
        )
        return Mutant.of(f"{name} adds in {dtype}", made)
    buffer = one_of(rng, (each for each in program.buffers if each.dtype in FLOATS))
    if buffer.dtype is dtype:
        raise ValueError("the same")
    return Mutant.of(f"{buffer.name} in {dtype}", reformatted(schedule, {buffer.name}, dtype))


def in_format(schedule: Schedule, names: set[str], dtype: DType) -> Iterator[Edit]:
    """Keep buffers, and all that are sent with them, in another format, if that can be."""
    try:
        yield Mutant.of(f"{', '.join(names)} in {dtype}", reformatted(schedule, names, dtype))
    except ValueError:
        return


def reformatted(schedule: Schedule, names: set[str], dtype: DType) -> Schedule:
    """Return the schedule with buffers `names`, and all sent with them, in another format."""
    linked = [
        {each.buffer for _, each in views_of(member)}
        for program in schedule.programs
        for operation in program.by_id.values()
        for member in members_of(operation)
    ]
    grown = set(names)
    while more := set().union(*(each for each in linked if each & grown)) - grown:
        grown |= more

    def change(operation: Operation) -> tuple[Operation, ...]:
        if isinstance(operation, Together):
            return (replace(operation, members=tuple(map(_sent, operation.members))),)
        return (_sent(operation),)

    def _sent(operation: Any) -> Any:  # noqa: ANN401 (any operation in, the same out)
        if {each.buffer for _, each in views_of(operation)} & grown and hasattr(operation, "wire"):
            return replace(operation, wire=dtype)
        return operation

    def with_dtype(program: Program) -> Program:
        found = tuple(
            replace(each, dtype=dtype) if each.name in grown else each for each in program.buffers
        )
        return replace(program, buffers=found)

    return everywhere(schedule, lambda program: rewritten(with_dtype(program), change))
