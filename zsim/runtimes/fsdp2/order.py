"""The order in which a stage of PyTorch's pipelines computes, sends, receives, gathers and reduces.

Classes and functions named in comments are those of `torch/distributed/pipelining/schedules.py` in
torch 2.13. Stages that ranks have several of are chunks here.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zsim.runtimes.stage_actions import Awaited, Direction, Messages, Reduce, StagePlace, Task

WHOLE_CHUNKS = 3
"""Chunks whose parameters a rank keeps gathered (`max_active_stages` of `_add_unshard_reshard`)."""


@dataclass(frozen=True, slots=True)
class Unshard:
    """The parameters of a chunk are gathered."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """The gathered parameters of a chunk are freed."""

    chunk: int


Action = Task | Messages | Awaited | Unshard | Reshard | Reduce


def one_forward_one_backward(place: StagePlace, micro_batches: int) -> Iterator[Action]:
    """Yield what a stage of one chunk does; exchanges may be empty.

    A send is waited for after the next task, a receive and what is exchanged as one at once.
    """
    # Schedule1F1B._step_microbatches
    ahead = min(micro_batches, place.stages - place.index)
    pending: list[Task] = []

    def forward(number: int) -> Task:
        return Task(Direction.FORWARD, 0, number)

    def backward(number: int) -> Task:
        return Task(Direction.BACKWARD, 0, number)

    def post(task: Task) -> Iterator[Messages]:
        if place.hands_on(task):
            pending.append(task)
            yield place.exchange(sends=[task], is_awaited=False)

    def settle() -> Iterator[Awaited]:
        while pending:
            yield Awaited(pending.pop(), is_sent=True)

    for number in range(ahead):
        yield place.exchange(receives=[forward(number)])
        yield forward(number)
        yield from settle()
        if number < ahead - 1:
            yield from post(forward(number))
    for number in range(micro_batches):
        is_steady = number <= micro_batches - ahead
        # a forward is sent with the receive of the next backward, and the other way round
        sends = [forward(number + ahead - 1)] if is_steady else []
        yield place.exchange(sends=sends, receives=[backward(number)])
        yield backward(number)
        yield from settle()
        following = number + ahead
        if following < micro_batches:
            yield place.exchange(sends=[backward(number)], receives=[forward(following)])
            yield forward(following)
        else:
            yield from post(backward(number))
    yield from settle()
    yield Reduce(0)


def interleaved(stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Return what every stage does, each with several chunks.

    Sends and receives are issued as soon as they can be; compute waits for what it reads alone.
    """
    # ScheduleInterleaved1F1B, _PipelineScheduleRuntime._prepare_schedule_with_comms
    places = [StagePlace(index=index, stages=stages, chunks=chunks) for index in range(stages)]
    computed = [
        list(_reducing(_unsharding(interleaved_tasks(place, micro_batches)), micro_batches))
        for place in places
    ]
    linked = zip(places, _linked(places, computed), strict=True)
    return [list(_waiting(place, each)) for place, each in linked]


def interleaved_tasks(place: StagePlace, micro_batches: int) -> list[Task]:
    """Return the forwards and backwards of a stage in order."""
    # ScheduleInterleaved1F1B._calculate_single_rank_operations, _get_1f1b_rank_ops
    chunks, turn = place.chunks, turn_of(micro_batches, place.stages)
    total = chunks * micro_batches
    # _get_warmup_ops
    ahead = min((chunks - 1) * turn + 2 * (place.stages - 1 - place.index), total)

    def task(direction: Direction, number: int) -> Task:
        turns, within = divmod(number, turn)
        rounds, chunk = divmod(turns, chunks)
        if direction is Direction.BACKWARD:
            chunk = chunks - 1 - chunk
        return Task(direction, chunk, rounds * turn + within)

    found = [task(Direction.FORWARD, number) for number in range(ahead)]
    for number in range(total):
        if number + ahead < total:
            found.append(task(Direction.FORWARD, number + ahead))
        found.append(task(Direction.BACKWARD, number))
    return found


def turn_of(micro_batches: int, stages: int) -> int:
    """Return how many micro-batches a chunk takes in turn (`microbatches_per_round`)."""
    return micro_batches // max(1, micro_batches // stages)


def _unsharding(tasks: Sequence[Task]) -> Iterator[Action]:
    """Yield tasks, and where chunks are gathered and freed: the next few are kept whole."""
    # _add_unshard_reshard
    whole: set[int] = set()
    for number, task in enumerate(tasks):
        needed = _next_chunks(tasks[number:])
        for chunk in sorted(whole.difference(needed)):
            whole.remove(chunk)
            yield Reshard(chunk)
        for chunk in needed:
            if chunk not in whole:
                whole.add(chunk)
                yield Unshard(chunk)
        yield task
    yield from (Reshard(chunk) for chunk in sorted(whole))


def _next_chunks(tasks: Iterable[Task]) -> list[int]:
    found: list[int] = []
    for task in tasks:
        if task.chunk not in found:
            found.append(task.chunk)
            if len(found) == WHOLE_CHUNKS:
                break
    return found


def _reducing(actions: Iterable[Action], micro_batches: int) -> Iterator[Action]:
    """Yield actions, and after the last backward of a chunk its reduction."""
    # _add_reduce_grad
    done: dict[int, int] = defaultdict(int)
    for action in actions:
        yield action
        if isinstance(action, Task) and action.direction is Direction.BACKWARD:
            done[action.chunk] += 1
            if done[action.chunk] == micro_batches:
                yield Reduce(action.chunk)


def _linked(places: Sequence[StagePlace], computed: Sequence[list[Action]]) -> list[list[Action]]:
    """Return what stages do with their messages: sent after what makes them, received as sent.

    Stages take turns, one action each, if what it reads is sent. So messages between two stages
    are issued in one order on both.
    """
    # _add_send_recv
    found: list[list[Action]] = [[] for _ in computed]
    come: list[set[Task]] = [set() for _ in computed]
    left = [deque(each) for each in computed]
    while any(left):
        for index, (place, own) in enumerate(zip(places, left, strict=True)):
            if not own:
                continue
            action = own[0]
            if isinstance(action, Task) and place.is_given(action) and action not in come[index]:
                continue
            found[index].append(own.popleft())
            if isinstance(action, Task) and place.hands_on(action):
                found[index].append(Messages(sends=(action,), is_awaited=False))
                other, task = _reader(place, action)
                found[other].append(Messages(receives=(task,), is_awaited=False))
                come[other].add(task)
    return found


def _reader(place: StagePlace, task: Task) -> tuple[int, Task]:
    """Return the stage that reads what a task makes, and its own task."""
    virtual = task.chunk * place.stages + place.index + task.direction
    chunk, index = divmod(virtual, place.stages)
    return index, Task(task.direction, chunk, task.micro_batch)


def _waiting(place: StagePlace, actions: Iterable[Action]) -> Iterator[Action]:
    """Yield actions, and before each task the wait for its input."""
    # _PipelineScheduleRuntime._step_microbatches, FORWARD and FULL_BACKWARD
    for action in actions:
        if isinstance(action, Task) and place.is_given(action):
            yield Awaited(action, is_sent=False)
        yield action
