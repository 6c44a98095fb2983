"""A schedule with named counts as one whose buffers have a place for each source and expert.

All rows of a source for an expert have one place, whatever their number, so values never depend on
a binding. Then an exchange of unequal blocks is one of equal blocks of places.

This represents all rows: a row's result depends on the row, and a gradient is a sum over rows.
"""

from dataclasses import replace
from functools import partial

from msgspec.structs import replace as changed

from zsim.schedule.changed_views import Operands, with_views
from zsim.schedule.operation import View
from zsim.schedule.schedule import Program, Schedule


def in_places(schedule: Schedule) -> Schedule:
    """Return `schedule` with one element for each place of counted rows; itself without counts."""
    if not schedule.counts:
        return schedule
    counts = tuple(
        replace(each, sent=each.experts, maximum=each.experts) for each in schedule.counts
    )
    experts = {each.name: each.experts for each in schedule.counts}
    programs = tuple(_in_places(each, experts) for each in schedule.programs)
    contract = replace(schedule.contract, peak_bytes=(), wire_bytes=None, host_bytes=None)
    return replace(schedule, counts=counts, programs=programs, contract=contract)


def _in_places(program: Program, experts: dict[str, int]) -> Program:
    sizes = {
        buffer.name: experts[buffer.rows.count]
        for buffer in program.buffers
        if buffer.rows is not None
    }
    views = {name: View(buffer=name, size=size) for name, size in sizes.items()}
    operands: Operands = {}
    change = partial(_view, views)
    return replace(
        program,
        buffers=tuple(
            buffer
            if buffer.rows is None
            else changed(buffer, elements=sizes[buffer.name], rows=changed(buffer.rows, width=1))
            for buffer in program.buffers
        ),
        setup=tuple(with_views(each, change, operands) for each in program.setup),
        step=tuple(with_views(each, change, operands) for each in program.step),
    )


def _view(views: dict[str, View], view: View) -> View:
    return views.get(view.buffer, view)
