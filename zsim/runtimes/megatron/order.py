"""The order in which a stage of Megatron-LM's pipeline computes, sends and receives.

Functions named in comments are those of `megatron/core/pipeline_parallel` in August 2026
(d98e8a64): schedules in `schedules.py`, `P2PCommunicator` in `p2p_communication.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum


class Way(IntEnum):
    """Direction of what is computed, and where it is sent: the offset along the pipeline."""

    FORWARD = 1
    BACKWARD = -1


@dataclass(frozen=True, slots=True)
class Task:
    """Forward or backward of a micro-batch in a chunk of this stage."""

    way: Way
    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a stage sends and receives as one, and waits for.

    Attributes:
        sends: tasks whose results it sends.
        receives: tasks whose inputs it receives.
    """

    sends: tuple[Task, ...] = ()
    receives: tuple[Task, ...] = ()


Action = Task | Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """A stage among others: its number, theirs, and the chunks of each."""

    index: int
    stages: int
    chunks: int = 1

    def makes_loss(self, chunk: int) -> bool:
        """Return whether the model ends with this chunk."""
        return self.index == self.stages - 1 and chunk == self.chunks - 1

    def begins(self, chunk: int) -> bool:
        """Return whether the model begins with this chunk."""
        return self.index == 0 and chunk == 0

    def is_given(self, task: Task) -> bool:
        """Return whether another stage sends what a task reads."""
        if task.way is Way.FORWARD:
            return not self.begins(task.chunk)
        return not self.makes_loss(task.chunk)

    def hands_on(self, task: Task) -> bool:
        """Return whether another stage reads what a task makes."""
        if task.way is Way.FORWARD:
            return not self.makes_loss(task.chunk)
        return not self.begins(task.chunk)

    def exchange(self, *, sends: Sequence[Task] = (), receives: Sequence[Task] = ()) -> Exchange:
        """Return what is left of an exchange at the ends of the model."""
        return Exchange(
            tuple(task for task in sends if self.hands_on(task)),
            tuple(task for task in receives if self.is_given(task)),
        )


def one_forward_one_backward(place: StagePlace, micro_batches: int) -> Iterator[Action]:
    """Yield what a stage does without interleaving; exchanges may be empty."""
    # forward_backward_pipelining_without_interleaving
    ahead = min(place.stages - 1 - place.index, micro_batches)
    left = micro_batches - ahead

    def forward(number: int) -> Task:
        return Task(Way.FORWARD, 0, number)

    def backward(number: int) -> Task:
        return Task(Way.BACKWARD, 0, number)

    for number in range(ahead):
        yield place.exchange(receives=[forward(number)])
        yield forward(number)
        yield place.exchange(sends=[forward(number)])
    if left:
        yield place.exchange(receives=[forward(ahead)])
    for number in range(left):
        yield forward(ahead + number)
        # send_forward_recv_backward
        yield place.exchange(sends=[forward(ahead + number)], receives=[backward(number)])
        yield backward(number)
        following = [forward(ahead + number + 1)] if number + 1 < left else []
        # send_backward_recv_forward, and send_backward after the last forward
        yield place.exchange(sends=[backward(number)], receives=following)
    for number in range(left, micro_batches):
        yield place.exchange(receives=[backward(number)])
        yield backward(number)
        yield place.exchange(sends=[backward(number)])


def under_way(actions: Sequence[Action], chunks: int) -> list[int]:
    """Return how many micro-batches of each chunk are held at once at most.

    One is from when its input is received, or its forward begins, to the end of its backward.
    """
    held: list[set[int]] = [set() for _ in range(chunks)]
    most = Counter[int]()
    for action in actions:
        begun = action.receives if isinstance(action, Exchange) else (action,)
        for task in begun:
            own = held[task.chunk]
            if task.way is Way.FORWARD:
                own.add(task.micro_batch)
                most[task.chunk] = max(most[task.chunk], len(own))
            elif task is action:
                own.remove(task.micro_batch)
    return [most[chunk] for chunk in range(chunks)]
