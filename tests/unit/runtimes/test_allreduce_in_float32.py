"""Gradients that Megatron-LM's ranks collect in the model's format and all-reduce whole in fp32."""

from dataclasses import replace

import pytest
from exact_training import proves_and_trains
from megatron_pipelines import SHAPE, model_of, strategy_of
from pydantic import ValidationError

from zsim.analysis.schedule_plan import wire_bytes
from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Allocate, AllReduce, Copy, Free, ReduceScatter
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron

WHOLE = Megatron(allreduce_in_float32=True, allreduce_bucket_size=100)


def of_four(options: Megatron = WHOLE, **changes: object) -> Strategy:
    strategy = strategy_of(1, 3, options).but({"parallel.data": 4})
    return strategy.but({name.replace("__", "."): value for name, value in changes.items()})


def made_for(strategy: Strategy) -> Schedule:
    return make_schedule(model_of(strategy), strategy)


@pytest.mark.matrix(21)
@pytest.mark.parametrize(
    "strategy",
    [
        of_four(),
        of_four(train__precision=Precision.FP32),
        of_four(train__precision=Precision.FP16, parallel__data=3, parallel__tensor=2),
        strategy_of(
            2, 4, WHOLE.but(num_layers_per_virtual_pipeline_stage=1, allreduce_bucket_size=1)
        ).but({"parallel.data": 2}),
        of_four(WHOLE.but(sequence_parallel=True), parallel__data=2, parallel__tensor=2),
        strategy_of(2, 3, WHOLE).but({"parallel.data": 3}),
        strategy_of(2, 4, WHOLE.but(scatter_gather_tensors_in_pipeline=True)).but(
            {"parallel.data": 2, "parallel.tensor": 2}
        ),
    ],
)
def test_ranks_that_sum_whole_gradients_train_what_one_process_does(strategy: Strategy) -> None:
    model = model_of(strategy, replace(SHAPE, tied_embeddings=True))
    proves_and_trains(make_schedule(model, strategy), model, strategy)


def test_gradients_move_whole_in_fp32_and_parameters_in_their_format() -> None:
    made = made_for(of_four())
    (program,) = made.programs
    sizes = [each.elements for each in program.buffers if each.kind is Kind.GRADIENT]
    # A ring of 4 moves twice three quarters of each bucket, in 4 bytes; of parameters in bf16 once.
    reduced, gathered = 2 * 3 * sum(sizes) // 4 * 4, 3 * sum(sizes) // 4 * 2
    lines = {
        each.collective: each.bytes for each in wire_bytes(made, program) if each.group == "data"
    }
    assert lines == {"all_reduce": reduced, "all_gather": gathered}
    assert not any(isinstance(each, ReduceScatter) for each in program.step)


def test_nothing_else_happens_while_a_bucket_is_summed() -> None:
    (program,) = made_for(of_four()).programs
    sums = [each for each in program.step if isinstance(each, AllReduce) and each.group == "data"]
    buckets = {each.id.split("/")[-2] for each in sums}
    assert len(sums) == len(buckets) > 3
    assert {each.stream for each in sums} == {COMPUTE}
    dtypes = {each.name: each.dtype for each in program.buffers}
    assert {dtypes[each.source.buffer] for each in sums} == {DType.FP32}


def test_one_bucket_at_a_time_is_there_flat_and_in_fp32() -> None:
    (program,) = made_for(of_four()).programs
    alive: set[str] = set()
    most = 0
    for each in program.step:
        names = {each.buffer} if isinstance(each, Allocate | Free) else set()
        found = {name for name in names if name.endswith(("/flat", "/wide"))}
        alive = alive - found if isinstance(each, Free) else alive | found
        most = max(most, len(alive))
    assert most == 2
    assert not alive


def test_a_bucket_is_closed_once_it_has_more_elements() -> None:
    for size in (1, 100, 1000):
        made = made_for(of_four(WHOLE.but(allreduce_bucket_size=size)))
        first, *closed = [
            [piece.start + piece.size for piece in layout.pieces]
            for layout in made.layouts
            if layout.name.startswith("bucket")
        ]
        # before its last parameter each bucket had at most so many, and with it more; what is left,
        # from the beginning of the model, is in the first
        assert all(end <= size for each in (first, *closed) for end in each[:-1])
        assert closed
        assert all(each[-1] > size for each in closed)


def test_fp32_is_summed_as_it_is() -> None:
    (program,) = made_for(of_four(train__precision=Precision.FP32)).programs
    copies = [each.id.split("/")[-1] for each in program.step if isinstance(each, Copy)]
    assert "flatten" in copies
    assert not {"widen", "narrow"} & {each for each in copies if "sum" in each}
    assert not any(buffer.name.endswith("/wide") for buffer in program.buffers)


@pytest.mark.parametrize(
    ("options", "changes", "why"),
    [
        (
            {"allreduce_in_float32": True, "overlap_grad_reduce": True},
            {},
            "allreduce_in_float32: true contradicts overlap_grad_reduce: allowed is one of the two",
        ),
        (
            {"allreduce_in_float32": True, "grad_reduce_in_fp32": True},
            {},
            "allreduce_in_float32: true contradicts grad_reduce_in_fp32: allowed is one of the two",
        ),
        ({"allreduce_bucket_size": 10}, {}, "needs allreduce_in_float32 = true"),
        (
            {"allreduce_in_float32": True},
            {"zero.stage": 0},
            "zero.megatron.allreduce_in_float32: true needs stage = 1",
        ),
        (
            {"allreduce_in_float32": True},
            {"parallel.replicate": 2},
            "parallel.replicate: 2 is not modelled for Megatron with allreduce_in_float32",
        ),
    ],
)
def test_what_says_otherwise_is_refused(
    options: dict[str, object], changes: dict[str, object], why: str
) -> None:
    with pytest.raises((ConfigError, ValidationError)) as caught:
        strategy_of(1, 1, Megatron.model_validate(options)).but(changes)
    assert why in str(caught.value).replace("\n  ", ": ")
