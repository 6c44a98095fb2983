"""A bucket that ranks do not divide: padding that is missed, pieces elsewhere, ends left out."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mutation import changed, without

from mutants.mutant import Mutant, Operator, on_streams
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Compute, Fill, View
from zsim.schedule.schedule import Schedule


def sites(schedule: Schedule) -> Iterator[Mutant]:
    for operation in on_streams(schedule):
        if isinstance(operation, Fill) and operation.value == 0:
            where: tuple[str, ...] = (operation.id, operation.target.buffer)
            yield Mutant(where, partial(without, schedule, operation.id))
            for moved in (_wider(operation.target), _later(operation.target)):
                if moved is not None:
                    make = partial(changed, schedule, operation.id, target=moved)
                    yield Mutant(where, make)
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            where = (operation.id, *(each.view.buffer for each in operation.operands))
            for view in (_shorter, _later):
                operands = [(each, view(each.view)) for each in operation.operands]
                cut = tuple(replace(each, view=less) for each, less in operands if less)
                if len(cut) == len(operation.operands):
                    make = partial(changed, schedule, operation.id, operands=cut)
                    yield Mutant(where, make)
    for layout in schedule.layouts:
        end = max((piece.end for piece in layout.pieces), default=0)
        if layout.pieces and end < layout.elements:
            yield Mutant((layout.name,), partial(_shifted, schedule, layout))
        if layout.axis is not None and layout.cuts is None and layout.blocks is None:
            yield Mutant((layout.name,), partial(_cut, schedule, layout))


def _shorter(view: View) -> View | None:
    """Without the last element."""
    return replace(view, size=view.size - 1) if view.size and view.axis is None else None


def _later(view: View) -> View | None:
    """Without the first element."""
    if not view.size or view.axis is not None or view.layout is not None:
        return None
    return replace(view, start=view.start + 1, size=view.size - 1)


def _wider(view: View) -> View | None:
    """With the element before the first."""
    if not view.start or view.axis is not None or view.layout is not None:
        return None
    return replace(view, start=view.start - 1, size=view.size + 1)


def _with(schedule: Schedule, layout: Layout) -> Schedule:
    layouts = tuple(layout if each.name == layout.name else each for each in schedule.layouts)
    return replace(schedule, layouts=layouts)


def _shifted(schedule: Schedule, layout: Layout) -> Schedule:
    """The last piece lies one element further on."""
    *first, last = layout.pieces
    pieces = (*first, replace(last, start=last.start + 1))
    return _with(schedule, replace(layout, pieces=pieces))


def _cut(schedule: Schedule, layout: Layout) -> Schedule:
    """The first rank has one element less, the last one more."""
    assert layout.axis is not None
    count = schedule.mesh.axis_size(layout.axis)
    size = layout.elements // count
    cuts = [size * place - (0 < place < count) for place in range(count + 1)]
    return _with(schedule, replace(layout, cuts=tuple(cuts)))


UNEVEN = Operator(
    "uneven last bucket",
    frozenset({"partition", "definedness", "placement", "value", "volume", "completeness"}),
    sites,
)
