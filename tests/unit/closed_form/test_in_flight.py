"""Micro-batches that stages have begun at their first backward, beside the orders of runtimes."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import fsdp2_pipelines
import megatron_pipelines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.closed_form.in_flight import in_flight
from zsim.model.model import Model
from zsim.model.pipeline_stages import stages
from zsim.runtimes.fsdp2.options import PipelineSchedule
from zsim.runtimes.fsdp2.pipeline import orders
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.registry import make_schedule
from zsim.runtimes.stage_actions import Direction, Task
from zsim.schedule.operation import Compute, walk
from zsim.strategy.strategy import Strategy


def begun(actions: Iterable[object], chunks: int) -> list[int]:
    """Return the forwards of each chunk before the first backward."""
    found = Counter[int]()
    for each in actions:
        if isinstance(each, Task):
            if each.direction is Direction.BACKWARD:
                break
            found[each.chunk] += 1
    return [found[chunk] for chunk in range(chunks)]


@pytest.mark.parametrize("schedule", PipelineSchedule)
@settings(max_examples=15, deadline=None)
@given(pipeline=st.integers(2, 6), rounds=st.integers(1, 4), more=st.integers(0, 3))
def test_orders_of_fsdp2_begin_as_many(
    schedule: PipelineSchedule, pipeline: int, rounds: int, more: int
) -> None:
    is_dealt = schedule in {PipelineSchedule.INTERLEAVED, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE}
    micro_batches = rounds * pipeline + (0 if is_dealt else more)
    options = fsdp2_pipelines.KEPT.but(pipeline_schedule=schedule)
    strategy = fsdp2_pipelines.strategy_of(pipeline, micro_batches, options)
    shape = replace(fsdp2_pipelines.SHAPE, layers=4 * pipeline)
    made = stages(fsdp2_pipelines.model_of(strategy, shape), strategy)
    for stage, order in zip(made, orders(strategy), strict=True):
        assert begun(order, len(stage.chunks)) == [*in_flight(stage, strategy)]


def forwards_before_backward(model: Model, strategy: Strategy) -> list[int]:
    """Return for each stage how many micro-batches its schedule begins, over all its chunks."""
    found: list[int] = []
    for program in make_schedule(model, strategy).programs:
        kernels = [each.id.split("/") for each in walk(program.step) if isinstance(each, Compute)]
        first = next(place for place, each in enumerate(kernels) if each[1] == "backward")
        chunks = {(each[2], each[3] if each[3][:5] == "chunk" else "") for each in kernels[:first]}
        found.append(len(chunks))
    return found


@pytest.mark.parametrize("layers_of_chunk", [None, 1, 2])
@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (2, 8), (4, 4), (4, 12)])
def test_schedules_of_megatron_begin_as_many(
    layers_of_chunk: int | None, pipeline: int, micro_batches: int
) -> None:
    options = Megatron(num_layers_per_virtual_pipeline_stage=layers_of_chunk)
    strategy = megatron_pipelines.strategy_of(pipeline, micro_batches, options)
    shape = replace(megatron_pipelines.SHAPE, layers=4 * pipeline)
    model = megatron_pipelines.model_of(strategy, shape)
    expected = [sum(in_flight(stage, strategy)) for stage in stages(model, strategy)]
    assert forwards_before_backward(model, strategy) == expected
