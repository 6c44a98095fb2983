"""What a stage of a pipeline does, in order: tasks, messages, waits, reductions.

Runtimes yield it as data, with actions of their own among it. It knows no buffers, so that an order
can be compared with upstream's line by line, and what one stage sends with what another takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Direction(IntEnum):
    """Direction of what is computed, and where it is sent: the offset along the pipeline."""

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
    """What a stage sends and receives at a time.

    Attributes:
        sends: tasks whose results it sends.
        receives: tasks whose inputs it receives.
        is_awaited: whether compute waits for it at once; otherwise an `Awaited` says when.
    """

    sends: tuple[Task, ...] = ()
    receives: tuple[Task, ...] = ()
    is_awaited: bool = True


@dataclass(frozen=True, slots=True)
class Awaited:
    """Compute waits until the result of a task is sent, or until its input has come."""

    task: Task
    is_sent: bool


@dataclass(frozen=True, slots=True)
class Reduce:
    """The reduction of a chunk's gradients begins: it has run all its backwards."""

    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """A stage among others: its number, theirs, and the chunks of each.

    Chunks follow each other from the last stage to the first, or `in_v` the second one goes back: a
    stage of number s has the chunks s and 2 P - 1 - s of P stages.
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
        """Return whether the model ends with this chunk."""
        return self.virtual(chunk) == self.stages * self.chunks - 1

    def begins(self, chunk: int) -> bool:
        """Return whether the model begins with this chunk."""
        return self.virtual(chunk) == 0

    def other_end(self, task: Task, *, is_sent: bool) -> tuple[int, int]:
        """Return the stage and its chunk that read what a task makes, or make what it reads."""
        way = int(task.direction) if is_sent else -int(task.direction)
        chunk, index = divmod(self.virtual(task.chunk) + way, self.stages)
        return (self.stages - 1 - index if self.in_v and chunk else index), chunk

    def is_given(self, task: Task) -> bool:
        """Return whether another stage sends what a task reads."""
        is_forward = task.direction is Direction.FORWARD
        ends = self.begins(task.chunk) if is_forward else self.makes_loss(task.chunk)
        return not ends and self.other_end(task, is_sent=False)[0] != self.index

    def hands_on(self, task: Task) -> bool:
        """Return whether another stage reads what a task makes."""
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
        """Return what is left of an exchange at the ends of the model."""
        return Messages(
            tuple(task for task in sends if self.hands_on(task)),
            tuple(task for task in receives if self.is_given(task)),
            is_awaited,
        )


def under_way(actions: Sequence[object], chunks: int) -> list[int]:
    """Return how many micro-batches of each chunk are held at once at most.

    One is from when its input is received, or its forward begins, to the end of its backward, or to
    when what that made is sent if compute goes on meanwhile.
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
