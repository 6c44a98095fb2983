"""The order in which a stage of Megatron-LM's pipeline computes, sends and receives.

Functions named in comments are from `megatron/core/pipeline_parallel` in August 2026
(d98e8a64): schedules in `schedules.py`, `P2PCommunicator` in `p2p_communication.py`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim_runtimes.stage_actions import Awaited, Direction, Messages, Reduce, StagePlace, Task


@dataclass(frozen=True, slots=True)
class Gather:
    """Start the gather of a chunk's updated parameters."""

    chunk: int


Action = Task | Messages | Awaited | Gather | Reduce


def one_forward_one_backward(place: StagePlace, micro_batches: int) -> Iterator[Action]:
    """Yield the actions of a stage without interleaving; exchanges may be empty."""
    # forward_backward_pipelining_without_interleaving
    ahead = min(place.stages - 1 - place.index, micro_batches)
    left = micro_batches - ahead

    def forward(number: int) -> Task:
        return Task(Direction.FORWARD, 0, number)

    def backward(number: int) -> Task:
        return Task(Direction.BACKWARD, 0, number)

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


class Interleaved:
    """The order of a stage with several chunks, which process micro-batches in groups.

    Each chunk in turn runs as many micro-batches as there are stages: in forward from the first
    chunk on, in backward from the last.
    """

    def __init__(self, place: StagePlace, micro_batches: int, *, overlaps: bool) -> None:
        # get_schedule_table, with `microbatch_group_size_per_vp_stage` equal to the number of
        # stages
        self.place = place
        self.overlaps = overlaps
        self.table = [
            (number, chunk)
            for first in range(0, micro_batches, place.stages)
            for chunk in range(place.chunks)
            for number in range(first, min(first + place.stages, micro_batches))
        ]
        # get_pp_rank_microbatches
        ahead = (place.stages - place.index - 1) * 2 + (place.chunks - 1) * place.stages
        self.ahead = min(ahead, len(self.table))
        self.last_micro_batch = micro_batches - 1
        self._come = Counter[tuple[Direction, int]]()
        self._expected: dict[Direction, list[Task]] = {direction: [] for direction in Direction}
        self._sent: Task | None = None

    def actions(self, *, gathers: bool, reduces: bool) -> Iterator[Action]:
        """Yield the actions of the stage.

        With `gathers` and `reduces`, include the gathers of each chunk's parameters and the
        reductions of its gradients.
        """
        # forward_backward_pipelining_with_interleaving
        total = len(self.table)
        left = total - self.ahead
        if gathers:  # param_sync_func
            yield Gather(0)
            yield Gather(1)
        yield self._exchange(receives=self._input(Direction.FORWARD, 0))
        for number in range(self.ahead):
            yield from self._gather(number) if gathers else ()
            yield self._forward(number)
            following = self._next(Direction.FORWARD, number) if number + 1 < total else []
            is_last = number == self.ahead - 1 and left > 0
            first = self._input(Direction.BACKWARD, self.place.chunks - 1) if is_last else []
            sends = [self._forward(number)]
            if self.overlaps:
                yield self._exchange(sends=sends, receives=following)
                if first:
                    yield self._post(receives=first)
            else:
                yield self._exchange(sends=sends, receives=[*following, *first])
        for number in range(left):
            yield from self._gather(self.ahead + number) if gathers else ()
            is_last = number == left - 1
            steady = self._overlapped if self.overlaps else self._batched
            for action in steady(number, is_last=is_last):
                yield action
                if reduces and action == self._backward(number):
                    yield from self._reduce(number)
        if not left:
            yield self._exchange(receives=self._input(Direction.BACKWARD, self.place.chunks - 1))
        for number in range(left, total):
            task = self._backward(number)
            yield from self._await(task)
            yield task
            yield from self._reduce(number) if reduces else ()
            following = self._next(Direction.BACKWARD, number) if number + 1 < total else []
            yield self._exchange(sends=[task], receives=following)
        if self._sent is not None:
            yield Awaited(self._sent, is_sent=True)
        for chunk in self._unreduced() if reduces else ():
            yield Reduce(chunk)

    def _batched(self, number: int, *, is_last: bool) -> Iterator[Action]:
        """Yield one forward and one backward, then the combined exchange of both."""
        forward, backward = self._forward(self.ahead + number), self._backward(number)
        yield forward
        yield backward
        following = [] if is_last else self._next(Direction.FORWARD, self.ahead + number)
        following += self._next(Direction.BACKWARD, number)
        # send_forward_backward_recv_forward_backward
        yield self._exchange(sends=[forward, backward], receives=following)

    def _overlapped(self, number: int, *, is_last: bool) -> Iterator[Action]:
        """Yield one forward and one backward, each followed by its exchange."""
        forward, backward = self._forward(self.ahead + number), self._backward(number)
        # pp_pre_forward, pp_post_forward: with `deallocate_pipeline_outputs`, wait for the send
        yield from self._await(forward)
        yield forward
        following = [] if is_last else self._next(Direction.FORWARD, self.ahead + number)
        yield self._post(sends=[forward], receives=following)
        if self.place.hands_on(forward):
            yield Awaited(forward, is_sent=True)
        # pp_pre_backward, pp_post_backward: wait for a send after the next one
        yield from self._await(backward)
        yield backward
        yield self._post(sends=[backward], receives=self._next(Direction.BACKWARD, number))
        if self._sent is not None:
            yield Awaited(self._sent, is_sent=True)
        self._sent = backward if self.place.hands_on(backward) else None

    def _forward(self, number: int) -> Task:
        micro_batch, chunk = self.table[number]
        return Task(Direction.FORWARD, chunk, micro_batch)

    def _backward(self, number: int) -> Task:
        micro_batch, chunk = self.table[number]
        return Task(Direction.BACKWARD, self.place.chunks - 1 - chunk, micro_batch)

    def _task(self, direction: Direction, number: int) -> Task:
        return self._forward(number) if direction is Direction.FORWARD else self._backward(number)

    def _input(self, direction: Direction, chunk: int) -> list[Task]:
        """Return the next task of a chunk if another stage sends its input; else an empty list."""
        task = Task(direction, chunk, self._come[direction, chunk])
        if not self.place.is_given(task):
            return []
        self._come[direction, chunk] += 1
        return [task]

    def _next(self, direction: Direction, number: int) -> list[Task]:
        """Return the task whose input arrives while results of the `number`-th task are sent."""
        # recv_tensor_from_previous_stage: the first stage in a direction is ahead of the last
        place = self.place
        leads = place.index == (0 if direction is Direction.FORWARD else place.stages - 1)
        if not leads:
            return self._input(
                direction, self._task(direction, (number + 1) % len(self.table)).chunk
            )
        if number < place.stages - 1:
            return []
        chunk = self._task(direction, number - (place.stages - 1)).chunk
        ends = place.chunks - 1 if direction is Direction.FORWARD else 0
        return [] if chunk == ends else self._input(direction, chunk + direction)

    def _exchange(self, *, sends: Sequence[Task] = (), receives: Sequence[Task] = ()) -> Messages:
        return self.place.exchange(sends=sends, receives=receives)

    def _post(self, *, sends: Sequence[Task] = (), receives: Sequence[Task] = ()) -> Messages:
        for task in receives:
            self._expected[task.direction].append(task)
        return self.place.exchange(sends=sends, receives=receives, is_awaited=False)

    def _await(self, task: Task) -> Iterator[Awaited]:
        """Wait for the oldest input in flight, unless the model starts with the task."""
        if self.place.is_given(task) and self._expected[task.direction]:
            yield Awaited(self._expected[task.direction].pop(0), is_sent=False)

    def _gather(self, number: int) -> Iterator[Gather]:
        # forward_step_helper_preprocess: simultaneous on all stages
        ahead = number + self.place.index
        if ahead < len(self.table) and self.table[ahead][0] == 0:
            chunk = self._forward(ahead).chunk + 1
            if 1 < chunk < self.place.chunks:
                yield Gather(chunk)

    def _reduce(self, number: int) -> Iterator[Reduce]:
        # backward_step_helper_postprocess: simultaneous on all stages
        before = number - self.place.index
        if before >= 0 and self.table[before][0] == self.last_micro_batch:
            yield Reduce(self._backward(before).chunk)

    def _unreduced(self) -> Iterator[int]:
        """Yield chunks whose reductions have not started at the last backward, in order."""
        begun = {
            action.chunk for number in range(len(self.table)) for action in self._reduce(number)
        }
        yield from (chunk for chunk in range(self.place.chunks) if chunk not in begun)
