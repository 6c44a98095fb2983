"""Stages of several chunks, which alternate with those of others (interleaved)."""

from collections import Counter
from dataclasses import replace

import pytest
from exact_training import proves_and_trains
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_pipelines import OVERLAPPED, SHAPE, model_of, strategy_of
from stage_orders import sent_and_taken, without_first_wait
from uniform_stages import CHUNK_PS, uniform_step_ps

from zsim.analysis.schedule_plan import plan
from zsim.model.model import ModelError
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    HostWait,
    Receive,
    Send,
    Together,
)
from zsim.strategy.activations import Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.megatron.order import Gather, Interleaved
from zsim_runtimes.stage_actions import Direction, Reduce, StagePlace, Task

TIED = replace(SHAPE, tied_embeddings=True)
CHUNKS = Megatron(num_layers_per_virtual_pipeline_stage=1)
WAITING = CHUNKS.but(overlap_p2p_comm=False)


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    ("strategy", "layers"),
    [
        (strategy_of(4, 4, CHUNKS), 8),
        (strategy_of(3, 6, WAITING).but({"train.clip_norm": None}), 9),
        (
            strategy_of(
                2,
                4,
                OVERLAPPED.but(num_layers_per_virtual_pipeline_stage=1, sequence_parallel=True),
            ).but(
                {
                    "parallel.data": 2,
                    "parallel.tensor": 2,
                    "train.precision": Precision.FP16,
                    "activations.checkpointing": Checkpointing.FULL,
                }
            ),
            4,
        ),
        (
            strategy_of(
                3,
                3,
                OVERLAPPED.but(num_layers_per_virtual_pipeline_stage=2, overlap_p2p_comm=False),
            ).but({"parallel.data": 2, "parallel.replicate": 2}),
            12,
        ),
    ],
)
def test_stages_of_several_chunks_train_what_one_process_does(
    strategy: Strategy, layers: int
) -> None:
    model = model_of(strategy, replace(TIED, layers=layers))
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_chunks_of_a_stage_alternate_with_those_of_others() -> None:
    strategy = strategy_of(2, 2, CHUNKS)
    model = model_of(strategy)
    found = plan(make_schedule(model, strategy), model)
    names = tuple(unit.name for unit in model.units)
    assert [each.units for each in found.stages] == [
        ("embedding", "block0", "block2"),
        ("block1", *names[4:]),
    ]


@pytest.mark.one_commit_in(6)
@settings(max_examples=200, deadline=None)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 3), st.booleans())
def test_chunks_take_what_those_before_them_send(
    stages: int, chunks: int, groups: int, overlaps: bool
) -> None:
    count = stages * groups
    orders = [
        list(
            Interleaved(
                StagePlace(index=index, stages=stages, chunks=chunks), count, overlaps=overlaps
            ).actions(gathers=True, reduces=True)
        )
        for index in range(stages)
    ]

    for way in Direction:
        for index, (sent, taken) in enumerate(sent_and_taken(orders, way)):
            assert sent == taken
            assert len(sent) == count * sum(
                StagePlace(index=index, stages=stages, chunks=chunks).hands_on(Task(way, each, 0))
                for each in range(chunks)
            )
    for order in orders:
        tasks = Counter(each for each in order if isinstance(each, Task))
        assert tasks == Counter(
            Task(way, chunk, number)
            for way in Direction
            for chunk in range(chunks)
            for number in range(count)
        )
        for kind in (Gather, Reduce):
            found = [each.chunk for each in order if isinstance(each, kind)]
            assert sorted(found) == list(range(chunks))


@pytest.mark.parametrize(("pipeline", "micro_batches", "chunks"), [(2, 4, 2), (4, 4, 2), (4, 8, 3)])
@pytest.mark.parametrize("options", [CHUNKS, WAITING])
def test_several_chunks_divide_the_bubble(
    pipeline: int, micro_batches: int, chunks: int, options: Megatron
) -> None:
    strategy = strategy_of(pipeline, micro_batches, options)
    if pipeline == 2 and options is WAITING:
        strategy = strategy_of(pipeline, micro_batches, CHUNKS)
    model = model_of(strategy, replace(SHAPE, layers=pipeline * chunks))
    made = make_schedule(model, strategy)
    # A chunk takes f and b: v m (f + b), and a bubble of (P - 1) (f + b), which is that of one
    # chunk over v (Narayanan et al. 2021, section 2.2.2).
    assert uniform_step_ps(made, model) == (chunks * micro_batches + pipeline - 1) * CHUNK_PS


def test_messages_that_overlap_have_a_stream_and_no_wait_of_the_host() -> None:
    found = {}
    for options in (CHUNKS, WAITING):
        strategy = strategy_of(4, 4, options)
        made = make_schedule(model_of(strategy, replace(SHAPE, layers=8)), strategy)
        step = made.programs[1].step
        moved = [
            each
            for each in step
            if isinstance(each, Send | Receive | Together) and each.group == "pipeline"
        ]
        waits = sum(isinstance(each, HostWait) for each in step)
        found[options.overlap_p2p_comm] = ({each.stream for each in moved}, waits > 0)
    assert found == {True: ({"pipeline"}, False), False: ({"compute"}, True)}


def test_a_message_that_compute_does_not_wait_for_is_found() -> None:
    strategy = strategy_of(2, 2, CHUNKS)
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    found = check(without_first_wait(made, 1), model)
    assert "races" in {each.invariant for each in found}


@pytest.mark.parametrize(
    ("strategy", "layers", "why"),
    [
        (strategy_of(2, 3, CHUNKS), 4, r"gradient_accumulation_steps: 3 must be a multiple of"),
        (strategy_of(2, 2, WAITING), 4, r"overlap_p2p_comm: false needs parallel\.pipeline > 2"),
        (strategy_of(2, 2, CHUNKS.but(num_layers_per_virtual_pipeline_stage=3)), 4, "x 3 of a"),
        (strategy_of(1, 2, CHUNKS), 4, r"per_virtual_pipeline_stage: 1 needs parallel\.pipeline"),
    ],
)
def test_what_chunks_cannot_be_is_refused(strategy: Strategy, layers: int, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        make_schedule(model_of(strategy, replace(SHAPE, layers=layers)), strategy)
