"""The order in which a stage of PyTorch's pipelines computes, communicates, gathers and reduces.

Classes and functions named in comments are from `torch/distributed/pipelining/schedules.py` in
torch 2.13. If a rank has several stages, they are called chunks here.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from zsim_runtimes.stage_actions import Awaited, Direction, Messages, Reduce, StagePlace, Task

WHOLE_CHUNKS = 3
"""Chunks whose parameters a rank keeps gathered (`max_active_stages` of `_add_unshard_reshard`)."""


@dataclass(frozen=True, slots=True)
class Unshard:
    """Gather the parameters of a chunk."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Reshard:
    """Free the gathered parameters of a chunk."""

    chunk: int


@dataclass(frozen=True, slots=True)
class WeightTask:
    """The second part of a backward, whose first part is a `Task`: gradients of parameters."""

    chunk: int
    micro_batch: int


Action = Task | WeightTask | Messages | Awaited | Unshard | Reshard | Reduce


def one_forward_one_backward(place: StagePlace, micro_batches: int) -> Iterator[Action]:
    """Yield the actions of a stage with one chunk; exchanges may be empty.

    A stage waits for a send after the next task, and for a receive or a combined exchange at once.
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
        # a forward is sent together with the receive of the next backward, and vice versa
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
    """Return the actions of every stage, each with several chunks.

    Sends and receives are issued as early as possible; compute waits only for its input.
    """
    # ScheduleInterleaved1F1B
    places = [StagePlace(index=index, stages=stages, chunks=chunks) for index in range(stages)]
    return _lowered(places, [interleaved_tasks(place, micro_batches) for place in places])


def interleaved_zero_bubble(stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of every stage with backwards in two parts.

    This is ZB1P of Qi et al. 2023, section 3. The second part of a backward fills bubbles: on stage
    s it runs s first parts later.
    """
    # ScheduleInterleavedZeroBubble
    places = [StagePlace(index=index, stages=stages, chunks=chunks) for index in range(stages)]
    return _lowered(places, [zero_bubble_tasks(place, micro_batches) for place in places])


def zero_bubble_in_v(stages: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of every stage with two chunks in a V (ZB-V of Qi et al. 2023, section 6).

    The last stage passes its first chunk's output directly to its second chunk. The first stage
    computes the loss, so backwards start there without a wait for other stages.
    """
    # ScheduleZBVZeroBubble
    places = [
        StagePlace(index=index, stages=stages, chunks=2, in_v=True) for index in range(stages)
    ]
    return _lowered(places, [tasks_in_v(place, micro_batches) for place in places])


def _lowered(
    places: Sequence[StagePlace], tasks: Sequence[Sequence[Task | WeightTask]]
) -> list[list[Action]]:
    """Return the tasks of all stages with gathers, reductions and messages inserted."""
    # _PipelineScheduleRuntime._prepare_schedule_with_comms
    computed = [list(_reducing(_unsharding(each), each)) for each in tasks]
    linked = zip(places, _linked(places, computed), strict=True)
    return [list(_waiting(place, each)) for place, each in linked]


def interleaved_tasks(place: StagePlace, micro_batches: int) -> list[Task]:
    """Return the forwards and backwards of a stage in order."""
    # ScheduleInterleaved1F1B._calculate_single_rank_operations, _get_1f1b_rank_ops
    forwards, backwards = _interleaved_tasks(place, micro_batches)
    ahead = _ahead(place, micro_batches, each=2)
    found = forwards[:ahead]
    for number, backward in enumerate(backwards):
        found += [*forwards[ahead + number : ahead + number + 1], backward]
    return found


def zero_bubble_tasks(place: StagePlace, micro_batches: int) -> list[Task | WeightTask]:
    """Return the forwards of a stage, and both parts of its backwards, in order."""
    # ScheduleInterleavedZeroBubble._calculate_single_rank_operations, _get_1f1b_rank_ops with
    # enable_zero_bubble; the bubbles of _add_bubbles_to_actions are not actions
    forwards, backwards = _interleaved_tasks(place, micro_batches)
    ahead = _ahead(place, micro_batches, each=1)
    weights = [WeightTask(each.chunk, each.micro_batch) for each in backwards]
    found: list[Task | WeightTask] = [*forwards[:ahead]]
    for number, backward in enumerate(backwards):
        found += [*forwards[ahead + number : ahead + number + 1], backward]
        if number >= place.index:
            found.append(weights.pop(0))
    return [*found, *weights]


def tasks_in_v(place: StagePlace, micro_batches: int) -> list[Task | WeightTask]:
    """Return the forwards of a stage with chunks in a V, and both parts of its backwards."""
    # ScheduleZBVZeroBubble._calculate_single_rank_operations
    stages, index = place.stages, place.index
    total = max(2 * stages - 1, micro_batches)  # micro-batches that do not exist are skipped
    tasks = _NumberedTasks()
    for _ in range(2 * (stages - index) - 1):
        tasks.add("F0")
    for _ in range(index):
        tasks.add("F1", "F0")
    for _ in range(stages - index):
        tasks.add("F1", "I1", "W1")
    while tasks.count["F1"] < total:
        if tasks.count["F0"] < total:
            tasks.add("F0")
        tasks.add("I0", "W0", "F1", "I1", "W1")
    for _ in range(index):
        tasks.add("I0", "I1")
    for _ in range(stages - index):
        tasks.add("I0", "W0")
    for chunk in (1, 0):
        while tasks.count[f"W{chunk}"] < total:
            tasks.add(f"W{chunk}")
    return [task for task in tasks.found if task.micro_batch < micro_batches]


class _NumberedTasks:
    """Tasks of a stage, numbered by kind and chunk with the next micro-batch each."""

    def __init__(self) -> None:
        self.count = Counter[str]()
        self.found: list[Task | WeightTask] = []

    def add(self, *names: str) -> None:
        for name in names:
            kind, chunk, number = name[0], int(name[1]), self.count[name]
            self.count[name] += 1
            if kind == "W":
                self.found.append(WeightTask(chunk, number))
            else:
                way = Direction.FORWARD if kind == "F" else Direction.BACKWARD
                self.found.append(Task(way, chunk, number))


def _interleaved_tasks(place: StagePlace, micro_batches: int) -> tuple[list[Task], list[Task]]:
    """Return all forwards of a stage, and all backwards, each in order."""
    chunks, turn = place.chunks, micro_batches_per_round(micro_batches, place.stages)

    def task(direction: Direction, number: int) -> Task:
        turns, within = divmod(number, turn)
        rounds, chunk = divmod(turns, chunks)
        if direction is Direction.BACKWARD:
            chunk = chunks - 1 - chunk
        return Task(direction, chunk, rounds * turn + within)

    forwards, backwards = (
        [task(way, number) for number in range(chunks * micro_batches)] for way in Direction
    )
    return forwards, backwards


def _ahead(place: StagePlace, micro_batches: int, *, each: int) -> int:
    """Return the number of forwards before the first backward, `each` per later stage."""
    # _get_warmup_ops
    behind = place.stages - 1 - place.index
    whole = (place.chunks - 1) * micro_batches_per_round(micro_batches, place.stages)
    return min(whole + each * behind, place.chunks * micro_batches)


def micro_batches_per_round(micro_batches: int, stages: int) -> int:
    """Return the number of micro-batches of a chunk in a row (`microbatches_per_round`)."""
    return micro_batches // max(1, micro_batches // stages)


def _unsharding(tasks: Sequence[Task | WeightTask]) -> Iterator[Action]:
    """Yield tasks with the gathers and frees of chunks; the next few chunks are kept whole."""
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


def _next_chunks(tasks: Iterable[Task | WeightTask]) -> list[int]:
    found: list[int] = []
    for task in tasks:
        if task.chunk not in found:
            found.append(task.chunk)
            if len(found) == WHOLE_CHUNKS:
                break
    return found


def _reducing(actions: Iterable[Action], tasks: Sequence[Task | WeightTask]) -> Iterator[Action]:
    """Yield actions, with the reduction of a chunk after its last task."""
    # _add_reduce_grad: the last FULL_BACKWARD or BACKWARD_WEIGHT
    last = {task.chunk: task for task in tasks}
    for action in actions:
        yield action
        if isinstance(action, Task | WeightTask) and last[action.chunk] == action:
            yield Reduce(action.chunk)


def _linked(places: Sequence[StagePlace], computed: Sequence[list[Action]]) -> list[list[Action]]:
    """Return the actions of stages with messages: sent after their producer, received when sent.

    Stages take turns, one action each, if the input of the action has been sent. So messages
    between two stages are issued in the same order on both.
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
    """Return the stage that reads the output of a task, and its task."""
    index, chunk = place.other_end(task, is_sent=True)
    return index, Task(task.direction, chunk, task.micro_batch)


def _waiting(place: StagePlace, actions: Iterable[Action]) -> Iterator[Action]:
    """Yield actions, with a wait for its input before each task."""
    # _PipelineScheduleRuntime._step_microbatches, FORWARD and FULL_BACKWARD
    for action in actions:
        if isinstance(action, Task) and place.is_given(action):
            yield Awaited(action, is_sent=False)
        yield action
