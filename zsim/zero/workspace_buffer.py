"""Workspace buffers: memory that a segment holds only while it runs, with its allocation trace."""

from collections.abc import Iterable, Sequence
from itertools import count

from msgspec.structs import replace

from zsim.dtype import DType
from zsim.model.model import Model, Segment
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.operation import Action, Operand, Role
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import SYMMETRIC
from zsim.zero.token_rows import Sized, TokenRows
from zsim.zero.visit_order import SegmentVisit, UnitVisit


def workspace_buffer(
    writer: ScheduleWriter,
    model: Model,
    visit: UnitVisit,
    part: SegmentVisit,
    *,
    saved: str,
    operands: Iterable[Operand],
    rows: TokenRows,
) -> str:
    """Return the workspace buffer of a segment in the direction of its visit; "" if it needs none.

    `saved` is the buffer of the segment's saved tensors, or "". Visits that save to different
    buffers (micro-batches in flight) have different workspaces. Without a workspace, the last
    buffer that is allocated before the segment runs carries the segment's allocation trace.
    """
    unit = model.units[visit.unit]
    segment, backward = unit.segments[part.segment], part.action is Action.BACKWARD
    size_bytes = segment.backward_workspace_bytes if backward else segment.forward_workspace_bytes
    turns = segment.backward_course if backward else segment.forward_course
    buffers = (saved, *(_gradients_made(model, segment, operands) if backward else ()))
    course = AllocationTrace(buffers=buffers, turns=turns) if turns else None
    last = saved if not backward else buffers[-1] if segment.inputs else ""
    name = f"{unit.name}/workspace{part.segment}/{'backward' if backward else 'forward'}"
    sized = rows.of_segment(unit.name, part.segment, size_bytes)
    return course_buffer(writer, name, sized, course, last=last)


def course_buffer(
    writer: ScheduleWriter,
    name: str,
    sized: Sized,
    course: AllocationTrace | None,
    *,
    last: str,
) -> str:
    """Return a buffer with trace `course`; if empty, return "" and give `last` the trace."""
    size_bytes, rows = sized
    if not size_bytes:
        if last and writer.buffers[last].produced:
            writer.buffers[last] = replace(writer.buffers[last], course=course)
        return ""
    for number in count():
        own = f"{name}/{number}" if number else name
        if own not in writer.buffers:
            kind = Kind.WORKSPACE
            writer.buffer(
                own, size_bytes, DType.INT8, kind, produced=True, course=course, rows=rows
            )
        if writer.buffers[own].course == course:
            return own
    raise AssertionError(name)


def workspace_of(operands: Sequence[Operand]) -> str:
    """Return the buffer from `workspace_buffer`, the last of `operands`; "" if there is none.

    Symmetric memory, which may come last as well, does not count: it is persistent.
    """
    if operands and operands[-1].role is Role.WORKSPACE:
        buffer = operands[-1].view.buffer
        return "" if buffer == SYMMETRIC else buffer
    return ""


def _gradients_made(model: Model, segment: Segment, operands: Iterable[Operand]) -> tuple[str, ...]:
    """Return the gradient buffers of each parameter and input; "" for inputs without a gradient."""
    made: dict[Role, list[str]] = {Role.GRADIENT: [], Role.INPUT_GRADIENT: []}
    for operand in operands:
        if operand.role in made:
            made[operand.role].append(operand.view.buffer)
    of_inputs = iter(made[Role.INPUT_GRADIENT])
    return (
        *made[Role.GRADIENT],
        *(
            next(of_inputs) if model.values[name].requires_gradient else ""
            for name in segment.inputs
        ),
    )
