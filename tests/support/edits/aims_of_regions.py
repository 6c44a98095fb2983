"""Named edits of updates that are done part by part of a shard, as windows on its layout."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from edits.aim import Aim, through, with_operands
from edits.programs import Edit
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Compute, Operand, Operation, View
from zsim.schedule.schedule import Program, Schedule

Windows = tuple[tuple[int, int], ...]
"""Start and end of each, in the whole tensor."""


def sharded(schedule: Schedule) -> dict[str, Layout]:
    """Updates of a whole shard whose operands all have one layout, by id, with that layout."""
    found: dict[str, Layout] = {}
    for program in schedule.programs:
        for each in program.by_id.values():
            if isinstance(each, Compute) and each.action is Action.UPDATE:
                name = _layout(program, [operand.view for operand in each.operands])
                if name is not None:
                    found[each.id] = schedule.layout_by_name[name]
    return found


def _layout(program: Program, views: Iterable[View]) -> str | None:
    names: set[str | None] = set()
    for view in views:
        buffer = program.by_name[view.buffer]
        is_whole = view == View(buffer=buffer.name, size=buffer.elements)
        names.add(buffer.layout if is_whole and buffer.shard is not None else None)
    return names.pop() if len(names) == 1 else None


def in_windows(each: Compute, layout: Layout, windows: Windows) -> tuple[Compute, ...]:
    """An update done window by window; the last has its name."""

    def cut(operand: Operand, low: int, high: int) -> Operand:
        view = View(buffer=operand.view.buffer, start=low, size=high - low, layout=layout.name)
        return replace(operand, view=view)

    made = [
        replace(
            with_operands(each, [cut(operand, low, high) for operand in each.operands]),
            id=each.id if number == len(windows) - 1 else f"{each.id}/{number}",
        )
        for number, (low, high) in enumerate(windows)
    ]
    return tuple(made)


def cut_at(layout: Layout, *, gap: int) -> Windows | None:
    """Two windows, with a parameter's elements between them left out, or in both if negative."""
    where = [piece.start + piece.size // 2 for piece in layout.pieces if piece.size > abs(gap)]
    if not where:
        return None
    low, high = where[-1], where[-1] + gap
    return (0, low), (high, layout.elements)


def in_two(gap: int, text: str) -> Aim:
    """Every update of a shard in two windows, with a gap between them."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        layouts = sharded(schedule)

        def change(each: Operation) -> tuple[Operation, ...] | None:
            if each.id not in layouts or not isinstance(each, Compute):
                return None
            windows = cut_at(layouts[each.id], gap=gap)
            return None if windows is None else in_windows(each, layouts[each.id], windows)

        yield from through(schedule, change, text)

    return aim


def of_a_parameter(schedule: Schedule) -> Iterator[Edit]:
    """Only the elements of all parameters but the last are updated."""
    layouts = sharded(schedule)

    def change(each: Operation) -> tuple[Operation, ...] | None:
        if each.id not in layouts or not isinstance(each, Compute):
            return None
        layout = layouts[each.id]
        windows = tuple((piece.start, piece.end) for piece in layout.pieces[:-1])
        return in_windows(each, layout, windows) if windows else None

    yield from through(schedule, change, "the last parameter is left out")


REGIONS: dict[str, Aim] = {
    "update in windows, an element left out": in_two(1, "one left out"),
    "update in windows, an element in two": in_two(-1, "one in both"),
    "update in windows without a parameter": of_a_parameter,
}
