"""Tokens that FSDP2's tensor ranks cast to 8-bit floats before linear layers gather them."""

from collections.abc import Callable

import pytest
from exact_training import proves_and_trains
from faults.schedules import everywhere, rewritten
from fitting import fitting
from token_ranks import LLAMA, TIED_GPT

import zsim
from zsim.api.run_result import RunResult
from zsim.dtype import DType
from zsim.model.architecture import Architecture
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Compute,
    Operation,
    Reduction,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.fsdp2.options import FSDP2, InputGathers

CASTS = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=3, emulate=FSDP2()),
    train=Train(
        gradient_accumulation_steps=2,
        precision=Precision.BF16,
        clip_norm=1.0,
        float8=Float8.TENSORWISE,
    ),
)
WIDE = CASTS.but({"zero.emulate": FSDP2(enable_float8_tensorwise_tp=False)})


def model_of(strategy: Strategy, shape: Architecture = LLAMA) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy)


def made_of(strategy: Strategy, shape: Architecture = LLAMA) -> Schedule:
    return make_schedule(model_of(strategy, shape), strategy)


@pytest.mark.matrix(8)
@pytest.mark.parametrize("shape", [LLAMA, TIED_GPT])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activations.checkpointing": Checkpointing.FULL, "activations.early_stop": True},
        {"activations.checkpointing": Checkpointing.OPERATIONS, "train.compile": True},
        {"parallel.context": 2},
        {"train.precision": Precision.FP16},
        {"zero.emulate": FSDP2(input_gathers=InputGathers.LINEAR)},
        {"zero.emulate": FSDP2(input_gathers=InputGathers.LINEAR), "train.compile": True},
        {"zero.emulate": FSDP2(enable_fsdp_float8_all_gather=True)},
        {"zero.emulate": FSDP2(disable_loss_parallel=True)},
    ],
)
def test_it_trains_what_plain_data_parallelism_does(
    changes: dict[str, object], shape: Architecture
) -> None:
    strategy = CASTS.but(changes)
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_stages_of_a_pipeline_cast_tokens() -> None:
    strategy = CASTS.but({"parallel.pipeline": 2})
    model = in_blocks(model_of(strategy))
    made = make_schedule(model, strategy)
    assert narrow_gathers(made)
    assert not check(made, model)


def narrow_gathers(made: Schedule) -> list[str]:
    return [
        each.id
        for program in made.programs
        for each in program.step
        if isinstance(each, AllGather) and each.wire is DType.FP8
    ]


def sent(made: Schedule, collective: str, *, scalar: bool = False) -> int:
    assert made.contract.wire_bytes is not None
    return sum(
        each.bytes
        for each in made.contract.wire_bytes
        if (each.group, each.collective, each.scalar) == ("tensor", collective, scalar)
    )


def test_tokens_of_blocks_take_one_byte_on_the_wire() -> None:
    # A rank has 2 of 4 tokens of 8 elements. In a micro-batch each of 2 blocks gathers them for
    # attention and MLP, and gradients of what both scatter; the head gathers what the last norm
    # makes, and the gradient of the embedding is gathered, both as they are.
    own, micro_batches = 2 * 8, 2
    ends = 2 * own * 2
    narrow, wide = (micro_batches * (2 * 4 * own * size + ends) for size in (1, 2))
    assert sent(made_of(CASTS), "all_gather") == narrow
    assert sent(made_of(WIDE), "all_gather") == wide
    assert sent(made_of(CASTS), "reduce_scatter") == sent(made_of(WIDE), "reduce_scatter")


def test_each_gather_has_a_scale_of_its_own() -> None:
    # Of 2 ranks each sends one number of two bytes there and back, for 2 x 4 gathers.
    assert sent(made_of(CASTS), "all_reduce", scalar=True) == 2 * 2 * 4 * 2 * 2
    assert sent(made_of(WIDE), "all_reduce", scalar=True) == 0


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    "changes",
    [{"train.float8": None}, {"train.float8": Float8.ROWWISE}, {"parallel.tensor": 1}],
)
def test_without_one_scale_or_a_tensor_axis_nothing_is_cast(changes: dict[str, object]) -> None:
    assert made_of(CASTS.but(changes)) != made_of(CASTS)
    assert not narrow_gathers(made_of(CASTS.but(changes)))


def test_what_was_gathered_is_kept_in_bytes() -> None:
    def saved(strategy: Strategy) -> int:
        return sum(each.saved_bytes for each in model_of(strategy).units[1].segments)

    # Attention and MLP keep 4 tokens of 8 elements each, a byte less of each. What `proj` and
    # `down` read is kept as it is cast: the latter's half of `wide` elements instead of two bytes
    # each, the former's 4 elements beside what attention keeps of its own.
    assert saved(WIDE) - saved(CASTS) == 2 * 4 * 8 + 4 * LLAMA.wide // 2 - 4 * 4


def changed(change: Callable[[Operation], Operation | None]) -> Callable[[Program], Program]:
    def each(operation: Operation) -> tuple[Operation, ...]:
        made = change(operation)
        return () if made is None else (made,)

    return lambda program: rewritten(program, each)


def of_tokens(operation: Operation) -> bool:
    return "/gather/block" in operation.id and "/allocate/" not in operation.id


def measured_alone(operation: Operation) -> Operation | None:
    is_reduced = of_tokens(operation) and isinstance(operation, AllReduce)
    return None if is_reduced else operation


def averaged(operation: Operation) -> Operation:
    if of_tokens(operation) and isinstance(operation, AllReduce):
        return replace(operation, reduction=Reduction.AVERAGE)
    return operation


def measured_in_part(operation: Operation) -> Operation:
    if isinstance(operation, Compute) and operation.action is Action.AMAX:
        first, *others = operation.operands
        smaller = replace(first, view=replace(first.view, size=first.view.size - 1))
        return replace(operation, operands=(smaller, *others))
    return operation


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (measured_alone, "its largest magnitude is not reduced over ranks of tensor"),
        (averaged, "makes something else of its largest magnitude"),
        (measured_in_part, "nothing measures the largest magnitude of what is cast"),
    ],
)
def test_a_scale_that_is_not_of_all_tokens_is_found(
    change: Callable[[Operation], Operation | None], why: str
) -> None:
    model = model_of(CASTS)
    wrong = everywhere(make_schedule(model, CASTS), changed(change))
    found = [each.why for each in check(wrong, model) if each.invariant == "scales"]
    assert found
    assert all(why in each for each in found), found


def run(*, casts: bool) -> RunResult:
    return zsim.run(
        {
            "title": "four wide blocks on eight tensor ranks",
            "model": {
                "architecture": "llama",
                "layers": 4,
                "hidden_size": 8192,
                "attention_heads": 64,
                "sequence_length": 8192,
                "vocab_size": 32000,
            },
            "cluster": {"topology": "dgx_h100_infiniband", "nodes": 1},
            "compute": {"profile": "h100"},
            "network": {"profile": "h100"},
            "parallel": {"tensor": 8},
            "zero": {
                "emulate": "fsdp2",
                "fsdp2": {"enable_float8_tensorwise_tp": casts},
            },
            "train": {
                "micro_batch_size": 1,
                "gradient_accumulation_steps": 1,
                "precision": "bf16",
                "float8": "tensorwise",
                "compile": True,
            },
        }
    )


def test_a_step_whose_gathers_are_large_is_faster_and_takes_less_memory() -> None:
    wide, narrow = run(casts=False), run(casts=True)
    assert narrow.exposed_communication_s < wide.exposed_communication_s
    assert narrow.step_time_s < wide.step_time_s
    assert narrow.peak_allocated_bytes < wide.peak_allocated_bytes
