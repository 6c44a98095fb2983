"""A schedule with named counts as one whose buffers have a place for each source and expert.

All rows of a source for an expert have one place, whatever their number, so values never depend on
a binding. Then an exchange of unequal blocks is one of equal blocks of places. Where rows are
dropped, those that a rule keeps and those that it drops have separate places (`row_kinds`).

This represents all rows: a row's result depends on the row, and a gradient is a sum over rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from msgspec.structs import replace as changed

from zsim.model.model import Model, Segment
from zsim.proof.execution.collective_runner import UnfollowedError
from zsim.schedule.changed_views import Operands, with_views
from zsim.schedule.operation import (
    Action,
    Allocate,
    Branch,
    Compute,
    HostWait,
    Operation,
    ReadCounts,
    Role,
    View,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.specification.row_kinds import RowKinds, drop_rules


def kinds_of(schedule: Schedule, model: Model | None) -> RowKinds:
    """Return the kinds of rows that the counts of a schedule and its model tell apart.

    Raises:
        UnfollowedError: too many rules drop rows.
    """
    rules = [] if model is None else [*drop_rules(model).values()]
    try:
        return RowKinds.of([*(each.drops for each in schedule.counts), *rules])
    except ValueError as error:
        raise UnfollowedError(str(error)) from None


def in_places(schedule: Schedule, kinds: RowKinds) -> Schedule:
    """Return `schedule` with one element for each place of counted rows; itself without counts.

    If plain training has expert ranks as well (`expert_axes`), exchanges of places are those of the
    model. Then nothing depends on counts, unless they drop rows, so the result has none.
    """
    if not schedule.counts:
        return schedule
    experts = {each.name: each.experts * kinds.count for each in schedule.counts}
    counts = tuple(
        replace(each, sent=experts[each.name], maximum=experts[each.name], capacity=0, padded=False)
        for each in schedule.counts
    )
    programs = tuple(_in_places(each, experts) for each in schedule.programs)
    contract = replace(schedule.contract, peak_bytes=(), wire_bytes=None, host_bytes=None)
    if schedule.contract.expert_axes and kinds.count == 1:
        counts, programs = (), tuple(map(_without_counts, programs))
    return replace(schedule, counts=counts, programs=programs, contract=contract)


def _without_counts(program: Program) -> Program:
    """Return a program whose buffers of places are plain ones, and whose host reads no counts."""
    buffers = tuple(
        each if each.rows is None else changed(each, rows=None) for each in program.buffers
    )
    setup, step = (tuple(_plain(part)) for part in (program.setup, program.step))
    return replace(program, buffers=buffers, setup=setup, step=step)


def _plain(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations without counts; waits for counts become plain waits."""
    for each in operations:
        match each:
            case Allocate() if each.micro_batch is not None:
                yield changed(each, micro_batch=None)
            case ReadCounts():
                yield HostWait(id=each.id, operation=each.operation)
            case Branch():
                yield changed(
                    each,
                    then=tuple(_plain(each.then)),
                    otherwise=tuple(_plain(each.otherwise)),
                )
            case _:
                yield each


def model_in_places(schedule: Schedule, model: Model, kinds: RowKinds) -> Model:
    """Return `model` with one element for each place of the values in counted rows of `schedule`.

    `schedule` is the original one; without counts, return `model` itself.
    """
    sizes = _values_in_rows(schedule, model) if schedule.counts else {}
    sizes = {name: places * kinds.count for name, places in sizes.items()}
    if not sizes:
        return model
    units = tuple(
        replace(unit, segments=tuple(_segment(each, sizes) for each in unit.segments))
        for unit in model.units
    )
    return replace(model, units=units)


def _segment(segment: Segment, sizes: dict[str, int]) -> Segment:
    outputs = tuple(
        replace(value, elements=sizes.get(value.name, value.elements)) for value in segment.outputs
    )
    return segment if outputs == segment.outputs else replace(segment, outputs=outputs)


def _values_in_rows(schedule: Schedule, model: Model) -> dict[str, int]:
    """Return the values that are in buffers of counted rows, and the places of each."""
    segments = {
        (unit.name, place): segment
        for unit in model.units
        for place, segment in enumerate(unit.segments)
    }
    experts = {each.name: each.experts for each in schedule.counts}
    found: dict[str, int] = {}
    for program in schedule.programs:
        for compute in program.patterns:
            if not isinstance(compute, Compute) or compute.action is not Action.FORWARD:
                continue
            segment = segments.get((compute.unit, compute.segment))
            operands = (each for each in compute.operands if each.role is Role.OUTPUT)
            for value, operand in zip(
                () if segment is None else segment.outputs, operands, strict=False
            ):
                rows = program.by_name[operand.view.buffer].rows
                if rows is not None:
                    found[value.name] = experts[rows.count]
    return found


def _in_places(program: Program, experts: dict[str, int]) -> Program:
    sizes = {
        buffer.name: experts[buffer.rows.count] * buffer.rows.parts
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
