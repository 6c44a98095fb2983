"""Visits of units, derived from the `Compute` operations of a program before it runs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    OF_SEGMENTS,
    Action,
    Compute,
    Operation,
    Role,
    StreamOperation,
    View,
    walk,
)
from zsim.schedule.parameter_copy import held
from zsim.schedule.schedule import Buffer, Program, Schedule
from zsim_torch.module.unit import TorchUnit, UnitRunError


class Visit(NamedTuple):
    """One unit on one micro-batch, which links its forward, recompute and backward."""

    unit: str
    segment: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class LaterUses:
    """Later uses of each visit by the program.

    Visits in `given_again` have a backward that reads the inputs of the forward. `parameters` is
    the data type of the units' parameters, or None if there are none. Buffers `without_gradient`
    are outputs of forwards that have no backward. `steady` buffers persist across steps, and
    nothing writes them between the first forward and the last backward.
    """

    recomputed: frozenset[Visit]
    given_again: frozenset[Visit]
    input_gradients: Mapping[Visit, int]
    batches: frozenset[str]
    parameters: DType | None
    without_gradient: frozenset[str] = frozenset()
    steady: frozenset[str] = frozenset()

    @classmethod
    def of(cls, program: Program) -> "LaterUses":
        """Return the later uses in `program`."""
        recomputed: set[Visit] = set()
        given_again: set[Visit] = set()
        gradients: dict[Visit, int] = {}
        batches: set[str] = set()
        formats: list[DType] = []
        outputs: dict[str, Visit] = {}
        for operation in walk(program.step):
            if not isinstance(operation, Compute):
                continue
            match operation.action:
                case Action.FORWARD:
                    made = views_of(operation, Role.OUTPUT)
                    outputs |= {view.buffer: visit_of(operation) for view in made}
                    views = views_of(operation, Role.PARAMETER)
                    formats += [program.by_name[view.buffer].dtype for view in views]
                case Action.RECOMPUTE:
                    recomputed.add(visit_of(operation))
                case Action.BACKWARD | Action.BACKWARD_INPUT:
                    count = len(list(views_of(operation, Role.INPUT_GRADIENT)))
                    gradients[visit_of(operation)] = count
                    if any(views_of(operation, Role.INPUT)):
                        given_again.add(visit_of(operation))
                case Action.LOAD:
                    batches.update(view.buffer for view in views_of(operation, Role.OUTPUT))
                case _:
                    pass
        return cls(
            frozenset(recomputed),
            frozenset(given_again),
            gradients,
            frozenset(batches),
            formats[0] if formats else None,
            frozenset(name for name, visit in outputs.items() if visit not in gradients),
            frozenset(program.persistent) - _written_between(tuple(walk(program.step))),
        )


def _written_between(operations: Sequence[Operation]) -> set[str]:
    """Return the buffers that operations write from the first forward to the last backward."""
    places = [
        place
        for place, operation in enumerate(operations)
        if isinstance(operation, Compute) and operation.action in OF_SEGMENTS
    ]
    return {
        access.view.buffer
        for operation in (operations[places[0] : places[-1]] if places else ())
        if isinstance(operation, StreamOperation)
        for access in accesses(operation)
        if access.writes
    }


def visit_of(compute: Compute) -> Visit:
    """Return the visit that `compute` belongs to."""
    return Visit(compute.unit, compute.segment, compute.micro_batch)


def views_of(compute: Compute, *roles: Role) -> Iterator[View]:
    """Return views of the operands in one of these roles, in order."""
    for operand in compute.operands:
        if operand.role in roles:
            yield operand.view


def parameter_order(
    schedule: Schedule, program: Program, compute: Compute, unit: TorchUnit
) -> tuple[int, ...]:
    """Return the place of each parameter operand in the unit's module: by name, or by order.

    Raises:
        UnitRunError: operands and parameters differ in number, name or size.
    """
    views = tuple(views_of(compute, Role.PARAMETER))
    if len(views) != len(unit.names):
        raise UnitRunError(
            f"unit {unit.name}: {len(unit.names)} parameters, the schedule has {len(views)}"
        )
    found: list[int] = []
    for index, view in enumerate(views):
        name = _parameter_name(schedule, program, view)
        if name is not None and name not in unit.names:
            raise UnitRunError(f"unit {unit.name}: the module has no parameter {name}")
        position = index if name is None else unit.names.index(name)
        if unit.shapes[position].numel() != view.size:
            raise UnitRunError(
                f"parameter {unit.names[position]}: {unit.shapes[position].numel()} elements, "
                f"the schedule has {view.size}"
            )
        found.append(position)
    if sorted(found) != list(range(len(views))):
        raise UnitRunError(f"unit {unit.name}: the schedule names a parameter twice")
    return tuple(found)


def _parameter_name(schedule: Schedule, program: Program, view: View) -> str | None:
    buffer = program.by_name[view.buffer]
    if buffer.layout is None or not view.size:
        return None
    layout = schedule.layout_by_name[buffer.layout]
    if layout.blocks is not None and buffer.shard is None:
        return _in_blocks(schedule, buffer, view)
    for piece in layout.pieces:
        if (piece.start, piece.size) == (view.start, view.size):
            return piece.parameter
    return None


def _in_blocks(schedule: Schedule, buffer: Buffer, view: View) -> str:
    """Return the parameter that `view` holds, whole and in order, in a layout of blocks.

    Raises:
        UnitRunError: `view` does not hold exactly one whole parameter.
    """
    end, names = view.start, set[str]()
    for part in sorted(held(schedule, buffer, {}), key=lambda each: each.position):
        if part.position == end < view.start + view.size and part.offset == end - view.start:
            end += part.size
            names.add(part.parameter)
    if end != view.start + view.size or len(names) != 1:
        raise UnitRunError(
            f"buffer {buffer.name}: elements {view.start} to {view.start + view.size} are no whole "
            "parameter; copy by parameter what was gathered in blocks"
        )
    return names.pop()
