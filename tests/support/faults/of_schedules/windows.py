"""Updates that are done part by part of a shard, as windows on its layout."""

from collections.abc import Callable, Iterable, Iterator

from faults.changes import Aim, Edit, through
from faults.selections import with_operands
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Compute, Operand, Operation, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

Windows = tuple[tuple[int, int], ...]
"""Start and end of each, in the whole tensor."""


def sharded(schedule: Schedule) -> dict[str, Layout]:
    """Return updates of a whole shard whose operands have one layout, by id, with that layout."""
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
    """Return an update done window by window; the last has its name."""

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
    """Return two windows with a gap in a parameter; if it is negative, they overlap."""
    where = [piece.start + piece.size // 2 for piece in layout.pieces if piece.size > abs(gap)]
    if not where:
        return None
    low, high = where[-1], where[-1] + gap
    return (0, low), (high, layout.elements)


def in_two(gap: int, text: str) -> Aim:
    """Return the operator that does every update of a shard in two windows with a gap."""
    return windowed(lambda layout: cut_at(layout, gap=gap), text)


def windowed(windows: Callable[[Layout], Windows | None], text: str) -> Aim:
    """Return the operator that does every update of a shard in windows on its layout."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        layouts = sharded(schedule)

        def change(each: Operation) -> tuple[Operation, ...] | None:
            if each.id not in layouts or not isinstance(each, Compute):
                return None
            chosen = windows(layouts[each.id])
            return in_windows(each, layouts[each.id], chosen) if chosen else None

        yield from through(schedule, change, text)

    return aim


def all_but_the_last(layout: Layout) -> Windows:
    return tuple((piece.start, piece.end) for piece in layout.pieces[:-1])


WINDOWS: dict[str, Aim] = {
    "update in windows, an element left out": in_two(1, "one left out"),
    "update in windows, an element in two": in_two(-1, "one in both"),
    "update in windows without a parameter": windowed(all_but_the_last, "not the last parameter"),
}
