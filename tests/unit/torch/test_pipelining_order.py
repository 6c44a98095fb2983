"""The order of a stage against what `torch.distributed.pipelining` of the installed torch does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from zsim_runtimes.fsdp2.order import (
    Action,
    Reshard,
    Unshard,
    WeightTask,
    interleaved,
    interleaved_zero_bubble,
    one_forward_one_backward,
    zero_bubble_in_v,
)
from zsim_runtimes.stage_actions import Awaited, Direction, Messages, Reduce, StagePlace, Task

TORCH: Any = schedules
"""Torch's module, whose functions are its own."""
Event = tuple[str, ...]
"""Actions of a stage, and their operands."""


class RecordedStage:
    """A stage that computes nothing, and notes what a schedule of torch asks of it."""

    def __init__(self, index: int, stages: int, events: list[Event]) -> None:
        self.stage_index = index
        self.is_last = index == stages - 1
        self.events = events

    def get_fwd_recv_ops(self, number: int) -> list[str]:
        return [] if self.stage_index == 0 else [f"receive F{number}"]

    def get_fwd_send_ops(self, number: int) -> list[str]:
        return [] if self.is_last else [f"send F{number}"]

    def get_bwd_recv_ops(self, number: int) -> list[str]:
        return [] if self.is_last else [f"receive B{number}"]

    def get_bwd_send_ops(self, number: int) -> list[str]:
        return [] if self.stage_index == 0 else [f"send B{number}"]

    def forward_one_chunk(self, number: int, *_: object, **__: object) -> None:
        self.events.append(("task", f"F{number}"))

    def backward_one_chunk(self, number: int, **_: object) -> None:
        self.events.append(("task", f"B{number}"))

    def perform_reduce_grad(self, factor: int) -> None:
        assert factor == 1
        self.events.append(("reduce",))


def torch_events(
    monkeypatch: pytest.MonkeyPatch, index: int, stages: int, count: int
) -> list[Event]:
    """Run torch's 1F1B on a stage that computes nothing; return what it does."""
    events: list[Event] = []
    waited: set[str] = set()

    def batch(operations: list[str], desc: str | None = None) -> list[str]:
        del desc
        if operations:
            events.append(("move", *operations))
        return operations

    def wait(work: list[str]) -> None:
        if work and not waited.issuperset(work):
            events.append(("wait", *work))
        waited.update(work)

    def nothing(*_: object, **__: object) -> None:
        return None

    monkeypatch.setattr(schedules, "_batch_p2p", batch)
    monkeypatch.setattr(schedules, "_wait_batch_p2p", wait)
    run: Any = SimpleNamespace(
        _n_microbatches=count,
        _num_stages=stages,
        _stage=RecordedStage(index, stages, events),
        _check_inputs=lambda *_: ([()] * count, [{}] * count),
        _initialize_stage=nothing,
        _maybe_compute_loss=nothing,
        _maybe_get_loss=nothing,
        _update_losses=nothing,
        scale_grads=False,
    )
    TORCH.Schedule1F1B._step_microbatches(run)
    return events


def name(task: Task) -> str:
    return f"{'F' if task.direction is Direction.FORWARD else 'B'}{task.micro_batch}"


def own_events(action: Action) -> list[Event]:
    """Return an action of a stage with one chunk in the words of the recording."""
    match action:
        case Messages():
            moved = [f"send {name(task)}" for task in action.sends]
            moved += [f"receive {name(task)}" for task in action.receives]
            found = [("move", *moved)] if moved else []
            return [*found, ("wait", *moved)] if moved and action.is_awaited else list(found)
        case Awaited(task, is_sent):
            return [("wait", f"{'send' if is_sent else 'receive'} {name(task)}")]
        case Reduce():
            return [("reduce",)]
        case Task():
            return [("task", name(action))]
        case _:
            raise AssertionError(action)


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 9), (5, 6)])
def test_one_chunk_goes_as_schedule_1f1b_of_torch_runs(
    monkeypatch: pytest.MonkeyPatch, stages: int, count: int
) -> None:
    for index in range(stages):
        order = one_forward_one_backward(StagePlace(index=index, stages=stages), count)
        made = [event for action in order for event in own_events(action)]
        assert made == torch_events(monkeypatch, index, stages, count)


def torch_actions(name: str, stages: int, chunks: int, count: int) -> dict[int, list[str]]:
    """Return what every rank does by a schedule of torch, lowered as its runtime takes it."""
    rounds = max(1, count // stages)
    made: Any = SimpleNamespace(
        n_local_stages=chunks,
        pp_group_size=stages,
        _n_microbatches=count,
        number_of_rounds=rounds,
        microbatches_per_round=count // rounds,
        num_stages=stages * chunks,
    )
    ranks = range(stages)
    kind = TORCH.get_schedule_class(name)
    tasks = {rank: kind._calculate_single_rank_operations(made, rank) for rank in ranks}
    if name == "InterleavedZeroBubble":
        made.pipeline_order = tasks
        tasks = kind._add_bubbles_to_actions(made, stages * chunks)
    lowered = {
        rank: TORCH._add_reduce_grad(
            list(TORCH._add_unshard_reshard(tasks[rank])),
            count,
        )
        for rank in ranks
    }
    style = "v" if name == "ZBVZeroBubble" else "loop"
    rank_of = TORCH.generate_stage_to_rank_mapping(stages, stages * chunks, style)
    linked = TORCH._add_send_recv(
        lowered, stage_to_rank=rank_of.__getitem__, num_stages=stages * chunks
    )
    return {rank: [str(action) for action in actions] for rank, actions in linked.items()}


def own_actions(place: StagePlace, order: list[Action], *, splits: bool = False) -> list[str]:
    """Actions of a stage as torch writes them; backwards that it `splits` are I, then W."""

    def written(task: Task | WeightTask, verb: str = "") -> str:
        way = "W" if isinstance(task, WeightTask) else name(task)[0]
        if splits and not verb and way == "B":
            way = "I"
        stage = place.virtual(task.chunk)
        return f"{stage}{verb}{'_' if verb else ''}{way}{task.micro_batch}"

    found: list[str] = []
    kinds = {Unshard: "UNSHARD", Reshard: "RESHARD", Reduce: "REDUCE_GRAD"}
    for action in order:
        match action:
            case Task() | WeightTask():
                found.append(written(action))
            case Messages(sends, receives):
                found += [written(task, "SEND") for task in sends]
                found += [written(task, "RECV") for task in receives]
            case Awaited():
                pass
            case _:
                found.append(f"{place.virtual(action.chunk)}{kinds[type(action)]}")
    return found


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [2, 3, 4, 5])
def test_several_chunks_go_as_the_interleaved_schedule_of_torch(stages: int, chunks: int) -> None:
    for count in (1, 2, 3, 4, 6, 8, 10):
        if count % max(1, count // stages):
            continue
        theirs = torch_actions("Interleaved1F1B", stages, chunks, count)
        for index, order in enumerate(interleaved(stages, chunks, count)):
            place = StagePlace(index=index, stages=stages, chunks=chunks)
            assert own_actions(place, order) == theirs[index]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("chunks", [2, 3, 4, 5])
def test_backwards_in_two_parts_go_as_the_zero_bubble_schedule_of_torch(
    stages: int, chunks: int
) -> None:
    for count in (1, 2, 3, 4, 6, 8, 10, 12):
        if count % max(1, count // stages):
            continue
        theirs = torch_actions("InterleavedZeroBubble", stages, chunks, count)
        for index, order in enumerate(interleaved_zero_bubble(stages, chunks, count)):
            place = StagePlace(index=index, stages=stages, chunks=chunks)
            assert own_actions(place, order, splits=True) == theirs[index]


# With more stages torch ends by freeing chunks in the order of a set of numbers above 7.
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_in_a_v_go_as_the_zero_bubble_schedule_of_torch(stages: int) -> None:
    for count in range(1, 15):
        theirs = torch_actions("ZBVZeroBubble", stages, 2, count)
        for index, order in enumerate(zero_bubble_in_v(stages, count)):
            place = StagePlace(index=index, stages=stages, chunks=2, in_v=True)
            assert own_actions(place, order, splits=True) == theirs[index]


@pytest.mark.parametrize("order_of", [interleaved, interleaved_zero_bubble])
def test_a_stage_waits_for_an_input_just_before_it_is_read(
    order_of: Callable[[int, int, int], list[list[Action]]],
) -> None:
    for index, order in enumerate(order_of(3, 2, 6)):
        place = StagePlace(index=index, stages=3, chunks=2)
        before: Action | None = None
        for action in order:
            if isinstance(action, Task) and place.is_given(action):
                assert before == Awaited(action, is_sent=False)
            before = action
