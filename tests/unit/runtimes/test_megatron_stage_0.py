"""Megatron-LM without its distributed optimizer: gradients all-reduced, states on every rank."""

from collections import Counter
from dataclasses import replace

import pytest
from exact_training import proves_and_trains
from megatron_pipelines import SHAPE, model_of, strategy_of

from zsim.analysis.schedule_plan import wire_bytes
from zsim.config_error import ConfigError
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import AllReduce, Together
from zsim.schedule.schedule import Kind
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron

OVERLAPPED = Megatron(overlap_grad_reduce=True, bucket_size=100)
WHOLE = {"zero.stage": 0}


@pytest.mark.matrix(12)
@pytest.mark.parametrize(
    "strategy",
    [
        strategy_of(1, 2, Megatron(average_in_collective=True)).but({"parallel.data": 3}),
        strategy_of(1, 2, OVERLAPPED).but(
            {"parallel.data": 2, "parallel.tensor": 2, "train.precision": Precision.FP16}
        ),
        strategy_of(2, 3, OVERLAPPED.but(grad_reduce_in_fp32=True)).but({"parallel.data": 3}),
        strategy_of(
            2, 4, OVERLAPPED.but(num_layers_per_virtual_pipeline_stage=1, sequence_parallel=True)
        ).but({"parallel.data": 2, "parallel.tensor": 2}),
    ],
)
def test_ranks_that_each_update_everything_train_what_one_process_does(strategy: Strategy) -> None:
    strategy = strategy.but(WHOLE)
    model = model_of(strategy, replace(SHAPE, tied_embeddings=True))
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_gradients_are_all_reduced_and_nothing_is_gathered() -> None:
    strategy = strategy_of(1, 3, Megatron(grad_reduce_in_fp32=True)).but(
        {"parallel.data": 4, **WHOLE}
    )
    model = model_of(strategy)
    made = make_schedule(model, strategy)
    elements = sum(each.elements for each in model.parameters)
    padded = -(-elements // 4) * 4
    # A ring of 4 moves twice three quarters of a buffer, here in fp32.
    (line,) = (each for each in wire_bytes(made, made.programs[0]) if each.group == "data")
    assert (line.collective, line.bytes) == ("all_reduce", 2 * 3 * padded // 4 * 4)


def test_every_rank_has_masters_and_moments_of_all_parameters() -> None:
    strategy = strategy_of(1, 1).but({"parallel.data": 4, **WHOLE})
    model = model_of(strategy)
    (program,) = make_schedule(model, strategy).programs
    held = Counter[Kind]()
    for buffer in program.buffers:
        held[buffer.kind] += buffer.elements
    padded = -(-sum(each.elements for each in model.parameters) // 4) * 4
    assert held[Kind.PARAMETER] == held[Kind.GRADIENT] == held[Kind.MASTER] == padded
    assert held[Kind.MOMENT] == 2 * padded  # Adam


def test_with_overlap_buckets_are_reduced_one_by_one_and_otherwise_at_once() -> None:
    counts: list[int] = []
    for options in (OVERLAPPED, Megatron()):
        strategy = strategy_of(1, 2, options).but({"parallel.data": 2, **WHOLE})
        (program,) = make_schedule(model_of(strategy), strategy).programs
        reduced = [
            each
            for each in program.step
            if isinstance(each, Together) and isinstance(each.members[0], AllReduce)
        ]
        counts.append(len(reduced))
    # buckets of 100 elements and the parameter that fills them, or one
    assert counts[0] > 3
    assert counts[1] == 1


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        (
            OVERLAPPED.but(overlap_param_gather=True),
            {},
            "zero.megatron.overlap_param_gather: true needs stage = 1",
        ),
        (
            Megatron(),
            {"parallel.replicate": 2},
            "parallel.replicate: 2 is not modelled for Megatron in stage 0",
        ),
    ],
)
def test_what_needs_shards_is_refused(
    options: Megatron, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        strategy_of(1, 1, options).but({**WHOLE, **changes})
    assert why in str(caught.value)
