"""Stages of FSDP2's pipelines: what each runs, holds, sends and when, and what is proved."""

from collections import Counter
from collections.abc import Callable

import pytest
from exact_training import proves_and_trains
from fsdp2_pipelines import CHUNKS, KEPT, SHAPE, model_of, strategy_of
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_orders import sent_and_taken, without_first_wait
from uniform_stages import CHUNK_PS, saved_peak, uniform_step_ps

from zsim.analysis.schedule_plan import plan, wire_bytes
from zsim.model.architecture import Llama, LoRA
from zsim.model.model import ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    AllGather,
    Allocate,
    Copy,
    Receive,
    ReduceScatter,
    Send,
    Together,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy
from zsim_runtimes.fsdp2.order import (
    Reshard,
    Unshard,
    interleaved,
    one_forward_one_backward,
)
from zsim_runtimes.stage_actions import Direction, Reduce, StagePlace, Task

FREED = KEPT.but(reshard_after_forward=True)
FOUR = CHUNKS.but(pipeline_stages_per_rank=4)


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        (strategy_of(4, 5, KEPT.but(reduce_dtype=None)).but({"train.clip_norm": None}), 8),
        (strategy_of(3, 4, FREED).but({"parallel.data": 2, "parallel.replicate": 2}), 4),
        (
            strategy_of(2, 3).but(
                {
                    "parallel.data": 2,
                    "parallel.tensor": 2,
                    "train.precision": Precision.FP16,
                    "activations.checkpointing": Checkpointing.FULL,
                }
            ),
            5,
        ),
        (strategy_of(2, 4, CHUNKS).but({"parallel.data": 2, "parallel.tensor": 2}), 6),
        (strategy_of(3, 3, FOUR).but({"parallel.data": 2}), 10),
    ],
)
def test_stages_train_what_one_process_does_and_are_proved(strategy: Strategy, layers: int) -> None:
    model = model_of(strategy, replace(SHAPE, layers=layers))
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


@pytest.mark.parametrize(
    ("options", "layers", "units"),
    [
        # 6 layers and one each for the ends are 8 for 3 stages: 3, 3 and 2.
        (KEPT, 6, [["embedding", "0", "1"], ["2", "3", "4"], ["5"]]),
        # 5 layers and two for the embedding alone are 7: 3, 2 and 2.
        (
            KEPT.but(first_stage_less_layers=2, last_stage_less_layers=0),
            5,
            [["embedding", "0"], ["1", "2"], ["3", "4"]],
        ),
        # 10 layers on 6 stages: 2 each, of which rank r has stages r and r + 3.
        (CHUNKS, 10, [["embedding", "0", "5", "6"], ["1", "2", "7", "8"], ["3", "4", "9"]]),
    ],
)
def test_layers_are_dealt_out_as_torchtitan_does(
    options: FSDP2, layers: int, units: list[list[str]]
) -> None:
    strategy = strategy_of(3, 3, options)
    model = model_of(strategy, replace(SHAPE, layers=layers))
    found = plan(make_schedule(model, strategy), model)
    names = [[unit.removeprefix("block") for unit in each.units] for each in found.stages]
    heads = [unit for unit in names[2] if unit.startswith("head")]
    assert heads
    assert [*names[:2], [unit for unit in names[2] if unit not in heads]] == units


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(0, 8))
def test_neighbors_take_what_is_sent_in_the_order_of_sending(stages: int, more: int) -> None:
    count = stages + more
    orders = [
        list(one_forward_one_backward(StagePlace(index=index, stages=stages), count))
        for index in range(stages)
    ]
    for way in Direction:
        assert all(sent == taken for sent, taken in sent_and_taken(orders, way))
    for index, order in enumerate(orders):
        tasks = Counter(action for action in order if isinstance(action, Task))
        assert tasks == Counter(
            Task(way, 0, number) for way in Direction for number in range(count)
        )
        # P - s micro-batches are computed ahead on stage s.
        forwards = [each for each in order if isinstance(each, Task | Reduce)]
        ahead = next(
            place
            for place, each in enumerate(forwards)
            if isinstance(each, Task) and each.direction is Direction.BACKWARD
        )
        assert ahead == stages - index
        assert order[-1] == Reduce(0)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 5), st.integers(2, 5), st.integers(1, 3), st.booleans())
def test_chunks_take_what_those_before_them_send_and_are_whole_where_they_run(
    stages: int, chunks: int, rounds: int, odd: bool
) -> None:
    # one more in each round, as long as that makes no round more
    count = (stages + (odd and rounds < stages)) * rounds
    orders = interleaved(stages, chunks, count)
    for way in Direction:
        assert all(sent == taken for sent, taken in sent_and_taken(orders, way))
    for order in orders:
        whole: set[int] = set()
        left = Counter(dict.fromkeys(range(chunks), count))
        for action in order:
            match action:
                case Unshard(chunk):
                    assert chunk not in whole
                    whole.add(chunk)
                    assert len(whole) <= 3
                case Reshard(chunk):
                    whole.remove(chunk)
                case Task():
                    assert action.chunk in whole
                    left[action.chunk] -= action.direction is Direction.BACKWARD
                case Reduce(chunk):
                    assert not left[chunk]
                case _:
                    pass
        assert not whole
        assert not any(left.values())
        reduced = [each.chunk for each in order if isinstance(each, Reduce)]
        assert sorted(reduced) == list(range(chunks))


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("pipeline", "micro_batches", "options"),
    [(2, 5, KEPT), (4, 7, FREED), (2, 4, CHUNKS), (4, 6, CHUNKS), (4, 8, FOUR)],
)
def test_a_step_takes_its_micro_batches_and_the_bubble(
    pipeline: int, micro_batches: int, options: FSDP2
) -> None:
    strategy, chunks = strategy_of(pipeline, micro_batches, options), options.chunks_of_stage
    model = model_of(strategy, replace(SHAPE, layers=pipeline * chunks))
    made = make_schedule(model, strategy)
    # v m (f + b) and a bubble of (P - 1) (f + b), f and b of a chunk (Narayanan et al. 2021, 2.2)
    assert uniform_step_ps(made, model) == (chunks * micro_batches + pipeline - 1) * CHUNK_PS


def test_a_stage_keeps_a_micro_batch_for_itself_and_each_stage_behind_it() -> None:
    strategy = strategy_of(4, 6)
    model = model_of(strategy, replace(SHAPE, layers=6))
    made = make_schedule(model, strategy)
    own = {unit.name: unit.segments for unit in model.units}
    for stage, shown in enumerate(plan(made, model).stages):
        segments = [each for name in shown.units for each in own[name]]
        saved = sum(-(-each.saved_bytes // 2) * 2 for each in segments)
        assert saved_peak(made.programs[stage]) == (4 - stage) * saved


def received(made: Schedule) -> list[int]:
    """Bytes that each stage keeps all the time for what it receives."""
    found: list[int] = []
    for program in made.programs:
        every = [
            member
            for each in program.step
            for member in (each.members if isinstance(each, Together) else (each,))
        ]
        names = {each.target.buffer for each in every if isinstance(each, Receive)}
        assert names <= set(program.persistent)
        found.append(sum(program.by_name[name].size_bytes for name in names))
    return found


@pytest.mark.parametrize(("options", "values"), [(KEPT, [1, 2, 1]), (CHUNKS, [3, 4, 3])])
def test_what_is_received_has_memory_of_its_own_for_each_micro_batch(
    options: FSDP2, values: list[int]
) -> None:
    strategy = strategy_of(3, 6, options)
    made = make_schedule(model_of(strategy, replace(SHAPE, layers=6)), strategy)
    # Hidden states of 4 tokens of 8 elements in bf16, and their gradients, in 6 micro-batches.
    assert received(made) == [6 * each * 4 * 8 * 2 for each in values]


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("options", "times"), [(KEPT, 1), (FREED, 5 + 1), (CHUNKS, 1)])
def test_parameters_are_gathered_once_and_reduced_once_unless_they_are_freed(
    options: FSDP2, times: int
) -> None:
    strategy = strategy_of(3, 5 if options is not CHUNKS else 3, options).but({"parallel.data": 2})
    made = make_schedule(model_of(strategy, replace(SHAPE, layers=10)), strategy)
    for program in made.programs[1:2]:  # without a root that has parameters
        gathered = Counter(
            each.target.buffer for each in program.step if isinstance(each, AllGather)
        )
        reduced = Counter(
            each.source.buffer for each in program.step if isinstance(each, ReduceScatter)
        )
        assert set(gathered.values()) == {times}
        assert len(gathered) == len(reduced)
        assert set(reduced.values()) == {1}


def test_whole_gradients_add_up_in_the_format_of_their_reduction() -> None:
    strategy = strategy_of(2, 2).but({"parallel.data": 2})
    made = make_schedule(model_of(strategy), strategy)
    for program in made.programs:
        sums = [each for each in program.buffers if each.name.endswith("/accumulated")]
        assert {each.dtype.size_bytes for each in sums} == {4}
        assert {each.kind for each in sums} == {Kind.GRADIENT}
        taken = Counter(each.buffer for each in program.step if isinstance(each, Allocate))
        assert all(taken[each.name] == 1 for each in sums)


def test_what_two_stages_send_goes_on_their_own_communicator_unless_it_is_an_exchange() -> None:
    strategy = strategy_of(3, 4)
    made = make_schedule(model_of(strategy), strategy)
    sent = [
        {line.group: line.bytes for line in wire_bytes(made, program) if line.collective == "send"}
        for program in made.programs
    ]
    size = 4 * 8 * 2
    # Stage s has w = 3 - s ahead: 5 - w activations and 4 - w gradients are sent while it receives.
    assert sent == [
        {"pipeline": 2 * size, "pipeline0_1": 2 * size},
        {"pipeline": (3 + 2) * size, "pipeline0_1": 2 * size, "pipeline1_2": size},
        {"pipeline": 3 * size, "pipeline1_2": size},
    ]


def test_messages_of_several_chunks_go_round_on_one_stream_for_each_neighbor() -> None:
    strategy = strategy_of(4, 4, CHUNKS)
    made = make_schedule(model_of(strategy, replace(SHAPE, layers=8)), strategy)
    step = made.programs[0].step
    moved = {(each.group, each.stream) for each in step if isinstance(each, Send | Receive)}
    assert moved == {("pipeline0_1", "pipeline_next"), ("pipeline0_3", "pipeline_previous")}


def test_a_message_that_compute_does_not_wait_for_is_found() -> None:
    strategy = strategy_of(2, 2, CHUNKS)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    found = check(without_first_wait(made, 1), model)
    assert "races" in {each.invariant for each in found}


def swapped(program: Program) -> Program:
    """The first two activations that are sent change places."""
    one, other = [each for each in program.step if isinstance(each, Send)][:2]
    places = {
        one.id: replace(one, source=other.source),
        other.id: replace(other, source=one.source),
    }
    return replace(program, step=tuple(places.get(each.id, each) for each in program.step))


def from_another(program: Program) -> Program:
    """The first activation is received on the communicator with the other neighbor."""
    first = next(each for each in program.step if isinstance(each, Receive))
    wrong = replace(first, group="pipeline1_2")
    return replace(program, step=tuple(wrong if each is first else each for each in program.step))


def overwritten(program: Program) -> Program:
    """The gradients of one micro-batch take the place of those before."""
    added = next(
        each
        for each in program.step
        if isinstance(each, Copy) and each.accumulate and "/accumulated" in each.target.buffer
    )
    wrong = replace(added, accumulate=False)
    return replace(program, step=tuple(wrong if each is added else each for each in program.step))


def kept_from_the_last(program: Program) -> Program:
    """A second message overwrites the memory that the first micro-batch reads."""
    one, other = [each for each in program.step if isinstance(each, Receive)][:2]
    wrong = replace(other, target=one.target)
    return replace(program, step=tuple(wrong if each is other else each for each in program.step))


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("stage", "edit"),
    [(0, swapped), (1, from_another), (1, overwritten), (1, kept_from_the_last)],
)
def test_a_wrong_stage_is_found(stage: int, edit: Callable[[Program], Program]) -> None:
    strategy = strategy_of(3, 3)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    programs = list(made.programs)
    programs[stage] = edit(programs[stage])
    assert check(replace(made, programs=tuple(programs)), model)


@pytest.mark.parametrize(
    ("strategy", "shape", "why"),
    [
        (strategy_of(3, 2), SHAPE, r"steps: 2 must be at least parallel\.pipeline = 3 for 1F1B"),
        (strategy_of(2, 5, CHUNKS), SHAPE, r"steps: 5 must be a multiple of 2, its rounds of 2"),
        (
            strategy_of(4, 4, FOUR),
            SHAPE,
            r"layers: 4 are too few for 16 stages .* 1 less",
        ),
        (strategy_of(2, 2, CHUNKS.but(reshard_after_forward=True)), SHAPE, "true is not modelled"),
        (strategy_of(2, 2, KEPT.but(forward_prefetch=1)), SHAPE, "forward_prefetch: 1 is not"),
        (
            strategy_of(2, 2, KEPT.but(offload_policy=OffloadPolicy.CPU)),
            SHAPE,
            "offload_policy: cpu is not modelled for pipeline = 2",
        ),
        (strategy_of(2, 2), replace(SHAPE, lora=LoRA(rank=1)), "with frozen parameters"),
        (strategy_of(2, 2), replace(SHAPE, tied_embeddings=True), "tied_embeddings: true puts"),
        (strategy_of(1, 2, CHUNKS), SHAPE, r"Interleaved1F1B needs parallel\.pipeline > 1"),
    ],
)
def test_what_does_not_go_with_a_pipeline_is_refused(
    strategy: Strategy, shape: Llama, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        make_schedule(model_of(strategy, shape), strategy)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pipeline_stages_per_rank": 2}, "must be 1 for 1F1B"),
        (
            {"pipeline_stages_per_rank": 1, "pipeline_schedule": "Interleaved1F1B"},
            "must be at least 2 for Interleaved1F1B",
        ),
        ({"pipeline_schedule": "DualPipeV"}, "InterleavedZeroBubble"),
    ],
)
def test_chunks_go_with_their_schedule(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FSDP2.model_validate(changes)
