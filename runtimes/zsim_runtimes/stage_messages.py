"""Tasks of a pipeline stage: their visits, and the buffers of their messages.

A message is named by the task whose result is sent, or whose input is received. Forward sends a
value to the next stage, backward the gradient of one to the previous stage.
"""

from collections.abc import Iterator, Sequence

from zsim.model.model import Value
from zsim.schedule.operation import Edge, View
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.micro_batch_slots import ChunkSlot
from zsim.zero.names import PIPELINE
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.stage_actions import Direction, Task


class StageMessages:
    """Messages of a stage, by chunk and slot of its micro-batches."""

    def __init__(self, writer: ScheduleWriter, slots: Sequence[Sequence[ChunkSlot]]) -> None:
        self.writer = writer
        self.slots = slots

    def slot_of(self, task: Task) -> ChunkSlot:
        """Return the slot of a task's micro-batch."""
        own = self.slots[task.chunk]
        return own[task.micro_batch % len(own)]

    def path(self, task: Task) -> str:
        """Return the prefix of a task's operations."""
        path = f"step/{task.direction.name.lower()}/mb{task.micro_batch}"
        return f"{path}/chunk{task.chunk}" if len(self.slots) > 1 else path

    def visits(self, task: Task) -> Iterator[UnitVisit]:
        """Yield the visits of a task, each with the writer at its path."""
        slot, path = self.slot_of(task), self.path(task)
        units = slot.passes.model.units
        for visit in slot.forward if task.direction is Direction.FORWARD else slot.backward:
            again = "/again" if visit.only_recomputes else ""
            self.writer.prefix = f"{path}/{units[visit.unit].name}{again}"
            yield visit

    def value(self, task: Task, *, is_sent: bool) -> Value:
        """Return the value that a task makes or reads, or the value whose gradient it does."""
        slot = self.slot_of(task)
        made = is_sent == (task.direction is Direction.FORWARD)
        value = slot.sent if made else slot.given
        assert value is not None
        return value

    def buffer(self, task: Task, *, is_sent: bool) -> str:
        """Return the buffer of a message."""
        name = self.value(task, is_sent=is_sent).name
        return name if task.direction is Direction.FORWARD else f"{name}/gradient"

    def move(
        self,
        task: Task,
        *,
        is_sent: bool,
        stream: str,
        after: tuple[Edge, ...] = (),
        pair: str | None = None,
    ) -> tuple[str, str]:
        """Send the result of a task, or receive its input; return its name and operation.

        It uses the communicator of all stages, or that of a `pair` of them.
        """
        moved = self.moved(task, is_sent=is_sent)
        self.writer.prefix = self.path(task)
        move, verb = (self.writer.send, "send") if is_sent else (self.writer.receive, "receive")
        path = f"{verb}/{self.buffer(task, is_sent=is_sent)}"
        offset = offset_of(task, is_sent=is_sent) if pair is None else 1
        return path, move(path, pair or PIPELINE, moved, offset, stream=stream, after=after)

    def moved(self, task: Task, *, is_sent: bool) -> str | View:
        """Return the buffer that is sent or received, whole."""
        return self.buffer(task, is_sent=is_sent)


def offset_of(task: Task, *, is_sent: bool) -> int:
    """Return the offset along the pipeline to the receiver, or to the sender, of a message."""
    return int(task.direction) if is_sent else -int(task.direction)
