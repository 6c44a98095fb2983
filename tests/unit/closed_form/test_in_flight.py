"""Micro-batches that stages have under way where backwards begin, beside the orders of runtimes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import fsdp2_pipelines
import megatron_pipelines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.model.model import Model
from zsim.model.pipeline_stages import stages
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Compute, walk
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy
from zsim_plan.bounds.in_flight import BackwardMoment, moments
from zsim_plan.bounds.memory_bounds import device_bytes
from zsim_runtimes.fsdp2.options import PipelineSchedule
from zsim_runtimes.fsdp2.order import WeightTask
from zsim_runtimes.fsdp2.pipeline import orders
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.stage_actions import Direction, Reduce, Task


def moments_in(order: Sequence[object], chunks: int) -> list[BackwardMoment]:
    """Return the first backward in `order`, and each that comes while all chunks have gradients."""
    parts = any(isinstance(each, WeightTask) for each in order)
    begun, collecting, found = Counter[int](), set[int](), list[BackwardMoment]()
    for each in order:
        match each:
            case Task(direction=Direction.FORWARD):
                begun[each.chunk] += 1
            case Task():
                has_all = len(collecting) == chunks
                if has_all or not found:
                    left = [begun[chunk] for chunk in range(chunks)]
                    found.append(BackwardMoment(in_flight=left, has_gradients=has_all))
                begun[each.chunk] -= 1
                collecting |= set() if parts else {each.chunk}
            case WeightTask():
                collecting.add(each.chunk)
            case Reduce():
                collecting.discard(each.chunk)
            case _:
                pass
    return found


@pytest.mark.matrix(9)
@pytest.mark.parametrize("schedule", PipelineSchedule)
@settings(max_examples=15, deadline=None)
@given(pipeline=st.integers(2, 6), rounds=st.integers(1, 4), more=st.integers(0, 3))
def test_orders_of_fsdp2_have_these_moments(
    schedule: PipelineSchedule, pipeline: int, rounds: int, more: int
) -> None:
    is_dealt = schedule in {PipelineSchedule.INTERLEAVED, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE}
    micro_batches = rounds * pipeline + (0 if is_dealt else more)
    options = fsdp2_pipelines.KEPT.but(pipeline_schedule=schedule)
    strategy = fsdp2_pipelines.strategy_of(pipeline, micro_batches, options)
    shape = replace(fsdp2_pipelines.SHAPE, layers=4 * pipeline)
    made = stages(fsdp2_pipelines.model_of(strategy, shape), strategy)
    for stage, order in zip(made, orders(strategy), strict=True):
        first, *collected = moments(stage, strategy)
        there = moments_in(order, len(stage.chunks))
        assert [*first.in_flight] == there[0].in_flight
        assert not first.has_gradients
        for moment in collected:
            assert moment.has_gradients
            assert [*moment.in_flight] in [each.in_flight for each in there if each.has_gradients]
        if rounds > 2:
            assert len(collected) == 1


def forwards_before_backward(model: Model, strategy: Strategy) -> list[int]:
    """Return for each stage how many micro-batches its schedule begins, over all its chunks."""
    found: list[int] = []
    for program in make_schedule(model, strategy).programs:
        kernels = [each.id.split("/") for each in walk(program.step) if isinstance(each, Compute)]
        first = next(place for place, each in enumerate(kernels) if each[1] == "backward")
        chunks = {(each[2], each[3] if each[3][:5] == "chunk" else "") for each in kernels[:first]}
        found.append(len(chunks))
    return found


@pytest.mark.matrix(6)
@pytest.mark.parametrize("layers_of_chunk", [None, 1, 2])
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_schedules_of_megatron_begin_as_many(
    layers_of_chunk: int | None, pipeline: int, micro_batches: int
) -> None:
    options = Megatron(num_layers_per_virtual_pipeline_stage=layers_of_chunk)
    strategy = megatron_pipelines.strategy_of(pipeline, micro_batches, options)
    shape = replace(megatron_pipelines.SHAPE, layers=4 * pipeline)
    model = megatron_pipelines.model_of(strategy, shape)
    expected = [sum(next(moments(stage, strategy)).in_flight) for stage in stages(model, strategy)]
    assert forwards_before_backward(model, strategy) == expected


@pytest.mark.matrix(6)
@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_a_stage_of_several_chunks_holds_no_less_than_one_of_one(
    checkpointing: Checkpointing, pipeline: int, micro_batches: int
) -> None:
    held: list[int] = []
    for of_chunk in (None, 2, 1):
        options = Megatron(num_layers_per_virtual_pipeline_stage=of_chunk)
        strategy = megatron_pipelines.strategy_of(pipeline, micro_batches, options)
        strategy = strategy.but({"activations.checkpointing": checkpointing})
        shape = replace(megatron_pipelines.SHAPE, layers=4 * pipeline)
        held.append(device_bytes(megatron_pipelines.model_of(strategy, shape), strategy))
    assert held[0] <= min(held)
