"""Actions of a pipeline stage, in order: tasks, messages, waits, reductions.

Runtimes yield actions as data, and may add their own. Actions do not refer to buffers, so that an
order can be compared line by line with that of the emulated runtime, and the sends of one stage
with the receives of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Direction of a computation and its result: the offset along the pipeline."""

    FORWARD = 1
    BACKWARD = -1


@dataclass(frozen=True, slots=True)
class Task:
    """Forward or backward of a micro-batch in a chunk of this stage."""

    direction: Direction
    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages that a stage sends and receives together.

    Attributes:
        sends: tasks whose results it sends.
        receives: tasks whose inputs it receives.
        is_awaited: True if compute waits for them at once; otherwise an `Awaited` sets when.
    """

    sends: tuple[Task, ...] = ()
    receives: tuple[Task, ...] = ()
    is_awaited: bool = True


@dataclass(frozen=True, slots=True)
class Awaited:
    """Make compute wait until the result of a task is sent, or until its input has arrived."""

    task: Task
    is_sent: bool


@dataclass(frozen=True, slots=True)
class Reduce:
    """Start the reduction of a chunk's gradients: it has run all its backwards."""

    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """A stage of a pipeline: its index, the number of stages, and of chunks on each.

    Chunks follow each other from the last stage to the first. With `in_v`, the second chunk goes
    back: stage s of P has the chunks s and 2 P - 1 - s.
    """

    index: int
    stages: int
    chunks: int = 1
    in_v: bool = False

    def virtual(self, chunk: int) -> int:
        """Return the number of a chunk along the model."""
        if self.in_v and chunk:
            return 2 * self.stages - 1 - self.index
        return chunk * self.stages + self.index

    def makes_loss(self, chunk: int) -> bool:
        """Return True if the model ends with this chunk."""
        return self.virtual(chunk) == self.stages * self.chunks - 1

    def begins(self, chunk: int) -> bool:
        """Return True if the model starts with this chunk."""
        return self.virtual(chunk) == 0

    def other_end(self, task: Task, *, is_sent: bool) -> tuple[int, int]:
        """Return the (stage, chunk) that reads the output of a task, or that makes its input."""
        way = int(task.direction) if is_sent else -int(task.direction)
        chunk, index = divmod(self.virtual(task.chunk) + way, self.stages)
        return (self.stages - 1 - index if self.in_v and chunk else index), chunk

    def is_given(self, task: Task) -> bool:
        """Return True if another stage sends the input of a task."""
        is_forward = task.direction is Direction.FORWARD
        ends = self.begins(task.chunk) if is_forward else self.makes_loss(task.chunk)
        return not ends and self.other_end(task, is_sent=False)[0] != self.index

    def hands_on(self, task: Task) -> bool:
        """Return True if another stage reads the output of a task."""
        is_forward = task.direction is Direction.FORWARD
        ends = self.makes_loss(task.chunk) if is_forward else self.begins(task.chunk)
        return not ends and self.other_end(task, is_sent=True)[0] != self.index

    def exchange(
        self,
        *,
        sends: Sequence[Task] = (),
        receives: Sequence[Task] = (),
        is_awaited: bool = True,
    ) -> Messages:
        """Return an exchange without the messages that do not exist at the ends of the model."""
        return Messages(
            tuple(task for task in sends if self.hands_on(task)),
            tuple(task for task in receives if self.is_given(task)),
            is_awaited,
        )


def in_flight(actions: Sequence[object], chunks: int) -> list[int]:
    """Return the largest number of micro-batches of each chunk that are held at once.

    A micro-batch is held from the receive of its input, or the start of its forward, to the end of
    its backward, or to the end of its send if compute continues meanwhile.
    """
    held: list[set[int]] = [set() for _ in range(chunks)]
    most = [0] * chunks
    leaves = {each.task for each in actions if isinstance(each, Awaited) and each.is_sent}
    for action in actions:
        begun: tuple[Task, ...] = ()
        ended: Task | None = None
        match action:
            case Messages(receives=begun):
                pass
            case Task(direction=Direction.FORWARD):
                begun = (action,)
            case Task() if action not in leaves:
                ended = action
            case Awaited(task=task, is_sent=True) if task.direction is Direction.BACKWARD:
                ended = task
            case _:
                pass
        for task in begun:
            if task.direction is Direction.FORWARD:
                own = held[task.chunk]
                own.add(task.micro_batch)
                most[task.chunk] = max(most[task.chunk], len(own))
        if ended is not None:
            held[ended.chunk].remove(ended.micro_batch)
    return most
