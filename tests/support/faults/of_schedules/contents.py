"""Contents: groups, sizes and reductions of collectives, scales, sums, fresh parameters, ends."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from faults.changes import Edit
from faults.fault import Mutant
from faults.of_schedules.shapes import with_layout
from faults.schedules import changed, edited, moved, target_of, without
from faults.selections import in_step, on_streams, touched
from zsim.schedule.access import accesses
from zsim.schedule.layout import Layout
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Operation,
    Previous,
    Receive,
    ReduceScatter,
    Reduction,
    Role,
    Send,
    SetScalar,
    StreamOperation,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule


def _with(
    schedule: Schedule, operation: Operation, *where: str, **fields: object
) -> Iterator[Edit]:
    """Yield the schedule with other fields in an operation."""
    text = ", ".join(f"{name} {value}" for name, value in fields.items())
    make = partial(changed, schedule, operation.id, **fields)
    yield Mutant(f"{operation.id} with {text}", make, (operation.id, *where))


def _without(schedule: Schedule, operation: Operation) -> Iterator[Edit]:
    make = partial(without, schedule, operation.id)
    yield Mutant(f"no {operation.id}", make, touched(operation))


def other_groups(schedule: Schedule) -> Iterator[Edit]:
    for operation in on_streams(schedule):
        if isinstance(
            operation, AllGather | ReduceScatter | AllReduce | Broadcast | Send | Receive
        ):
            for group in schedule.groups:
                if group.name != operation.group:
                    yield from _with(schedule, operation, group=group.name)


def _smaller(view: View, by: int) -> View:
    return replace(view, size=view.size - by)


def other_sizes(schedule: Schedule) -> Iterator[Edit]:
    """Read and write a little less; the rest stays in the buffers as it was."""
    for operation in on_streams(schedule):
        views: dict[str, Any] = {}
        match operation:
            case AllGather(source=source, target=target) if source.size:
                count = target.size // source.size
                views = {"source": _smaller(source, 1), "target": _smaller(target, count)}
            case ReduceScatter(source=source, target=target) if target.size:
                count = source.size // target.size
                views = {"source": _smaller(source, count), "target": _smaller(target, 1)}
            case AllReduce(source=source, target=target) if source.size:
                views = {"source": _smaller(source, 1), "target": _smaller(target, 1)}
            case Copy(source=source, target=target) if source.size and target.size:
                views = {"source": _smaller(source, 1), "target": _smaller(target, 1)}
            case Fill(target=target) if target.size:
                views = {"target": _smaller(target, 1)}
            case _:
                continue
        yield from _with(schedule, operation, *touched(operation), **views)


def other_reductions(schedule: Schedule) -> Iterator[Edit]:
    for operation in on_streams(schedule):
        if isinstance(operation, ReduceScatter | AllReduce):
            for reduction in Reduction:
                if reduction is not operation.reduction:
                    yield from _with(schedule, operation, reduction=reduction)


def other_scales(schedule: Schedule) -> Iterator[Edit]:
    """Change a divisor or a constant, or forget a scalar."""
    for operation in in_step(schedule):
        match operation:
            case Copy(divisor=divisor):
                yield from _with(schedule, operation, divisor=2 * divisor)
                if divisor != 1:
                    yield from _with(schedule, operation, divisor=1)
            case Fill(value=value, scalar=scalar):
                yield from _with(schedule, operation, value=2 * value or 1.0)
                if scalar is not None:
                    yield from _with(schedule, operation, scalar=None)
            case Compute(action=Action.UNSCALE | Action.CLIP):
                if operation.scalars:
                    yield from _with(schedule, operation, scalars=())
                if operation.action is Action.UNSCALE:
                    yield from _without(schedule, operation)
            case SetScalar(add=add) if add:
                yield from _with(schedule, operation, add=2 * add)
            case _:
                pass


def skipped(schedule: Schedule) -> Iterator[Edit]:
    """Leave out a gather, a reduction, a contribution or an update, or a gradient of a measure."""
    ends = (Action.UPDATE, Action.CLIP, Action.NORM, Action.FINITE)
    for operation in on_streams(schedule):
        if isinstance(operation, AllGather | ReduceScatter | AllReduce | Copy) or (
            isinstance(operation, Compute) and operation.action in ends
        ):
            yield from _without(schedule, operation)
        if isinstance(operation, Compute) and operation.action in (Action.NORM, Action.FINITE):
            for place, operand in enumerate(operation.operands):
                if operand.role is Role.GRADIENT:
                    left = (*operation.operands[:place], *operation.operands[place + 1 :])
                    yield from _with(schedule, operation, operand.view.buffer, operands=left)


def overwritten(schedule: Schedule) -> Iterator[Edit]:
    """Overwrite instead of adding, or add where a sum begins."""
    for operation in on_streams(schedule):
        if isinstance(operation, Copy):
            other = not operation.accumulate
            yield from _with(schedule, operation, operation.target.buffer, accumulate=other)


def stale(schedule: Schedule) -> Iterator[Edit]:
    """Leave out what makes parameters fresh, do it too early, or do not wait for it."""
    operations = in_step(schedule)
    writing: set[str] = set()
    for operation in operations:
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            writing |= {each.view.buffer for each in accesses(operation) if each.writes}
        elif isinstance(operation, Copy | AllGather) and operation.source.buffer in writing:
            writing.add(operation.target.buffer)
            yield from _without(schedule, operation)
            source = next(
                each
                for each in operations
                if any(
                    a.writes and a.view.buffer == operation.source.buffer for a in accesses(each)
                )
                and isinstance(each, Compute | Copy)
            )
            make = partial(_before, schedule, operation, source)
            where = (*touched(operation), source.id)
            yield Mutant(f"{operation.id} before {source.id}", make, where)
    for operation in operations:
        if isinstance(operation, StreamOperation):
            lost = [each for each in operation.after if isinstance(each, Previous)]
            if lost:
                kept = tuple(each for each in operation.after if each not in lost)
                yield from _with(schedule, operation, *map(target_of, lost), after=kept)


def _before(schedule: Schedule, late: StreamOperation, early: Operation) -> Schedule:
    """Return the schedule with `late` just before `early`, without edges to later operations."""
    operations = in_step(schedule)
    known = {each.id for each in operations[: operations.index(early)]}
    after = tuple(edge for edge in late.after if isinstance(edge, Previous) or edge in known)
    less = replace(late, after=after)
    changed = edited(schedule, lambda each: (less if each.id == late.id else each,))
    return moved(changed, late.id, before=early.id)


def uneven(schedule: Schedule) -> Iterator[Edit]:
    """Miss padding, leave out ends, or lay pieces elsewhere, in unevenly divided buckets."""
    for operation in on_streams(schedule):
        if isinstance(operation, Fill) and operation.value == 0:
            yield from _without(schedule, operation)
            for view in (_wider(operation.target), _later(operation.target)):
                if view is not None:
                    yield from _with(schedule, operation, view.buffer, target=view)
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            for cut in (_shorter, _later):
                views = [(each, cut(each.view)) for each in operation.operands]
                operands = tuple(replace(each, view=view) for each, view in views if view)
                if len(operands) == len(operation.operands):
                    yield from _with(schedule, operation, *touched(operation), operands=operands)
    for layout in schedule.layouts:
        end = max((piece.end for piece in layout.pieces), default=0)
        if layout.pieces and end < layout.elements:
            yield Mutant(
                f"{layout.name} shifted", partial(_shifted, schedule, layout), (layout.name,)
            )
        if layout.axis is not None and layout.cuts is None and layout.blocks is None:
            yield Mutant(f"{layout.name} cut", partial(_cut, schedule, layout), (layout.name,))


def _shorter(view: View) -> View | None:
    """Return the view without its last element."""
    return replace(view, size=view.size - 1) if view.size and view.axis is None else None


def _later(view: View) -> View | None:
    """Return the view without its first element."""
    if not view.size or view.axis is not None or view.layout is not None:
        return None
    return replace(view, start=view.start + 1, size=view.size - 1)


def _wider(view: View) -> View | None:
    """Return the view with the element before its first."""
    if not view.start or view.axis is not None or view.layout is not None:
        return None
    return replace(view, start=view.start - 1, size=view.size + 1)


def _shifted(schedule: Schedule, layout: Layout) -> Schedule:
    """Lay the last piece one element further on."""
    *first, last = layout.pieces
    return with_layout(
        schedule, replace(layout, pieces=(*first, replace(last, start=last.start + 1)))
    )


def _cut(schedule: Schedule, layout: Layout) -> Schedule:
    """Give the first rank one element less, and the last one more."""
    assert layout.axis is not None
    count = schedule.mesh.axis_size(layout.axis)
    size = layout.elements // count
    cuts = [size * place - (0 < place < count) for place in range(count + 1)]
    return with_layout(schedule, replace(layout, cuts=tuple(cuts)))
