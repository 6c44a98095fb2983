"""The buffer of what a segment holds only while it runs, with the course of its tensors."""

from collections.abc import Iterable, Sequence
from itertools import count

from zsim.dtype import DType
from zsim.model.model import Model, Segment
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.operation import Action, Operand, Role
from zsim.schedule.quick_init import quick_replacer
from zsim.schedule.schedule import Buffer, Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import SYMMETRIC
from zsim.zero.visit_order import SegmentVisit, UnitVisit

_with_course = quick_replacer(Buffer, "course")


def workspace_buffer(
    writer: ScheduleWriter,
    model: Model,
    visit: UnitVisit,
    part: SegmentVisit,
    *,
    saved: str,
    operands: Iterable[Operand],
) -> str:
    """Return the buffer of a segment in the direction of its visit; no name if it is nothing.

    `saved` is the buffer of what it saves, where it saves something. Visits that save to different
    buffers, those of micro-batches that are on their way at once, have different ones. Where there
    is none, the last buffer that is allocated before the segment runs has its course.
    """
    unit = model.units[visit.unit]
    segment, backward = unit.segments[part.segment], part.action is Action.BACKWARD
    size_bytes = segment.backward_workspace_bytes if backward else segment.forward_workspace_bytes
    turns = segment.backward_course if backward else segment.forward_course
    buffers = (saved, *(_gradients_made(model, segment, operands) if backward else ()))
    course = AllocationTrace(buffers=buffers, turns=turns) if turns else None
    last = saved if not backward else buffers[-1] if segment.inputs else ""
    name = f"{unit.name}/workspace{part.segment}/{'backward' if backward else 'forward'}"
    return course_buffer(writer, name, size_bytes, course, last=last)


def course_buffer(
    writer: ScheduleWriter,
    name: str,
    size_bytes: int,
    course: AllocationTrace | None,
    *,
    last: str,
) -> str:
    """Return a buffer with a course; without bytes no name, and the course is the `last` one's."""
    if not size_bytes:
        if last and writer.buffers[last].produced:
            writer.buffers[last] = _with_course(writer.buffers[last], course)
        return ""
    for number in count():
        own = f"{name}/{number}" if number else name
        if own not in writer.buffers:
            kind = Kind.WORKSPACE
            writer.buffer(own, size_bytes, DType.INT8, kind, produced=True, course=course)
        if writer.buffers[own].course == course:
            return own
    raise AssertionError(name)


def workspace_of(operands: Sequence[Operand]) -> str:
    """Return the buffer that `workspace_buffer` gave, the last of `operands`; no name if none.

    Symmetric memory, in which parts may be made before it, is there all the time.
    """
    if operands and operands[-1].role is Role.WORKSPACE:
        buffer = operands[-1].view.buffer
        return "" if buffer == SYMMETRIC else buffer
    return ""


def _gradients_made(model: Model, segment: Segment, operands: Iterable[Operand]) -> tuple[str, ...]:
    """Return buffers of the gradients of each parameter and input, of those that have one."""
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
