"""Stages of Megatron-LM's pipeline: what each runs, holds, sends and when, and what is proved."""

from collections import Counter

import pytest
from exact_training import proves_and_trains
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_pipelines import OVERLAPPED, SHAPE, model_of, strategy_of
from stage_orders import sent_and_taken
from uniform_stages import CHUNK_PS, saved_peak, uniform_step_ps

from zsim.analysis.schedule_plan import plan, wire_bytes
from zsim.model.model import ModelError
from zsim.model.pipeline_stages import virtual_stages
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.mesh import Group
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Compute,
    Copy,
    HostWait,
    Receive,
    ReduceScatter,
    Send,
    Together,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.megatron.order import one_forward_one_backward
from zsim_runtimes.stage_actions import Direction, StagePlace, Task, in_flight


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(4, 2),  # fewer micro-batches than stages: all of them are ahead
        strategy_of(2, 3, OVERLAPPED).but({"parallel.data": 2, "parallel.replicate": 2}),
        strategy_of(2, 3, Megatron(sequence_parallel=True)).but(
            {
                "parallel.data": 2,
                "parallel.tensor": 2,
                "train.precision": Precision.FP16,
                "activations.checkpointing": Checkpointing.FULL,
            }
        ),
        strategy_of(4, 5).but({"train.precision": Precision.FP32, "train.clip_norm": None}),
    ],
)
def test_stages_train_what_one_process_does_and_are_proved(strategy: Strategy) -> None:
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_every_stage_has_as_many_layers() -> None:
    strategy = strategy_of(3, 2)
    model = model_of(strategy, replace(SHAPE, layers=6))
    found = plan(make_schedule(model, strategy), model)
    names = tuple(unit.name for unit in model.units)
    assert names[:3] == ("embedding", "block0", "block1")
    assert [each.units for each in found.stages] == [names[:3], names[3:5], names[5:]]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 12))
def test_neighbors_take_what_is_sent_in_the_order_of_sending(
    stages: int, micro_batches: int
) -> None:
    orders = [
        list(one_forward_one_backward(StagePlace(index=index, stages=stages), micro_batches))
        for index in range(stages)
    ]
    for way in Direction:
        ends = (stages - 1,) if way is Direction.FORWARD else (0,)
        for index, (sent, taken) in enumerate(sent_and_taken(orders, way)):
            count = 0 if index in ends else micro_batches
            assert sent == taken == [(index, number) for number in range(count)]
    for index, order in enumerate(orders):
        tasks = Counter(action for action in order if isinstance(action, Task))
        every = [Task(way, 0, number) for way in Direction for number in range(micro_batches)]
        assert tasks == Counter(every)
        # P - s micro-batches are under way on stage s, or all there are.
        assert in_flight(order, 1) == [min(stages - index, micro_batches)]


def test_a_stage_keeps_a_micro_batch_for_itself_and_each_stage_behind_it() -> None:
    strategy = strategy_of(4, 6)
    model = model_of(strategy)
    of_stage = Counter[int]()
    for unit, stage in zip(model.units, virtual_stages(model, strategy), strict=True):
        of_stage[stage] += sum(-(-each.saved_bytes // 2) * 2 for each in unit.segments)
    for stage, program in enumerate(make_schedule(model, strategy).programs):
        assert saved_peak(program) == (4 - stage) * of_stage[stage]


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 1), (2, 5), (4, 4), (4, 7), (4, 2)])
def test_a_step_takes_its_micro_batches_and_the_bubble(pipeline: int, micro_batches: int) -> None:
    strategy = strategy_of(pipeline, micro_batches)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    # (m + P - 1) (f + b), of which (P - 1) (f + b) is the bubble (Narayanan et al. 2021, 2.2.1).
    assert uniform_step_ps(made, model) == (micro_batches + pipeline - 1) * CHUNK_PS


def test_neighbors_send_hidden_states_on_and_their_gradients_back() -> None:
    strategy = strategy_of(4, 5, Megatron(sequence_parallel=True)).but({"parallel.tensor": 2})
    made = make_schedule(model_of(strategy), strategy)
    sent = [
        [line.bytes for line in wire_bytes(made, program) if line.group == "pipeline"]
        for program in made.programs
    ]
    # 4 tokens of 8 elements in bf16, of which each of 2 tensor ranks has its own tokens: 32 bytes,
    # in each of 5 micro-batches. Those in the middle send both ways.
    assert sent == [[5 * 32], [2 * 5 * 32], [2 * 5 * 32], [5 * 32]]


def test_a_send_and_a_receive_are_issued_as_one_between_a_forward_and_a_backward() -> None:
    strategy = strategy_of(3, 4)
    made = make_schedule(model_of(strategy, replace(SHAPE, layers=3)), strategy)
    kinds = Counter(
        tuple(type(member).__name__ for member in operation.members)
        for operation in made.programs[1].step
        if isinstance(operation, Together) and operation.group == "pipeline"
    )
    # The middle stage of three is one forward ahead, so one and one follow in turn three times:
    # send_forward_recv_backward each time, send_backward_recv_forward but for the last.
    assert kinds == {("Send", "Receive"): 3 + 2}


def test_the_host_waits_for_every_exchange() -> None:
    strategy = strategy_of(2, 4)
    made = make_schedule(model_of(strategy), strategy)
    for program in made.programs:
        step = program.step
        for place, operation in enumerate(step):
            if isinstance(operation, Send | Receive | Together) and operation.group == "pipeline":
                follows = step[place + 1]
                assert isinstance(follows, HostWait)
                assert follows.operation == operation.id


def test_the_first_stage_alone_reduces_while_backward_goes_on() -> None:
    strategy = strategy_of(2, 3, OVERLAPPED).but({"parallel.data": 2})
    made = make_schedule(model_of(strategy), strategy)
    reduced = []
    for program in made.programs:
        last_backward = max(
            place
            for place, each in enumerate(program.step)
            if isinstance(each, Compute) and each.action is Action.BACKWARD
        )
        places = [
            place < last_backward
            for place, each in enumerate(program.step)
            if isinstance(each, Together) and isinstance(each.members[0], ReduceScatter)
        ]
        reduced.append((len(places) > 1, any(places)))
    assert reduced == [(True, True), (False, False)]


def test_layers_that_do_not_go_round_are_refused() -> None:
    strategy = strategy_of(3, 2)
    with pytest.raises(ModelError, match=r"model\.layers: 4 must be a multiple of .* = 3$"):
        make_schedule(model_of(strategy), strategy)


TIED = replace(SHAPE, tied_embeddings=True)
Groups = tuple[Group, ...]


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(2, 3, Megatron(sequence_parallel=True)).but(
            {"parallel.data": 2, "parallel.tensor": 2, "train.precision": Precision.FP16}
        ),
        strategy_of(4, 3, OVERLAPPED).but({"parallel.data": 2, "parallel.replicate": 2}),
    ],
)
def test_a_tied_embedding_is_trained_as_one_on_the_first_and_the_last_stage(
    strategy: Strategy,
) -> None:
    model = model_of(strategy, TIED)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)
    (group,) = (each for each in made.groups if each.name == "embedding")
    assert group.size(made.mesh) == 2
    assert decode_value(encode_value(made.groups, Groups), Groups) == made.groups


def test_an_embedding_whose_gradients_are_not_summed_over_stages_is_found() -> None:
    strategy = strategy_of(3, 2).but({"parallel.data": 2})
    model = model_of(strategy, replace(TIED, layers=3))
    made = make_schedule(model, strategy)
    names = {
        each.id
        for program in made.programs
        for each in program.step
        if isinstance(each, AllReduce) and each.group == "embedding"
    }
    assert len(names) == 2

    def left(program: Program) -> Program:
        step = tuple(
            replace(each, after=tuple(edge for edge in each.after if edge not in names))
            if isinstance(each, Compute | Copy)
            else each
            for each in program.step
            if each.id not in names
        )
        return replace(program, step=step)

    found = check(replace(made, programs=tuple(map(left, made.programs))), model)
    assert "values" in {each.invariant for each in found}


def test_a_norm_that_counts_a_tied_embedding_twice_is_found() -> None:
    strategy = strategy_of(2, 2)
    model = model_of(strategy, TIED)
    made = make_schedule(model, strategy)
    layouts = tuple(
        replace(each, pieces=tuple(replace(piece, copies=()) for piece in each.pieces))
        for each in made.layouts
    )
    found = check(replace(made, layouts=layouts), model)
    assert "values" in {each.invariant for each in found}
