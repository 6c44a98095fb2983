"""Products of FSDP2's tensor ranks that are fused with gathers and reduce-scatters of tokens."""

from collections.abc import Callable
from typing import Any

import pytest
from exact_training import proves_and_trains
from fitting import fitting
from misordered_parts import (
    gathered_before_it_is_there,
    never_shared,
    read_too_early,
    rewritten_everywhere,
    scattered_before_it_is_made,
)
from token_ranks import LLAMA, TIED_GPT

from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import Architecture
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import (
    AllGather,
    CollectiveOperation,
    Copy,
    Free,
    Operation,
    ReduceScatter,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule, ScheduleError
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim.zero.names import SYMMETRIC
from zsim_runtimes.fsdp2.options import FSDP2, InputGathers

FUSED = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=3, emulate=FSDP2(enable_async_tensor_parallel=True)),
    train=Train(
        gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0, compile=True
    ),
)
PLAIN = FUSED.but({"zero.emulate": FSDP2()})


def model_of(strategy: Strategy, shape: Architecture = LLAMA, *, sequences: int = 2) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy, sequences=sequences)


def made_of(strategy: Strategy, *, sequences: int = 2) -> Schedule:
    return make_schedule(model_of(strategy, sequences=sequences), strategy)


@pytest.mark.matrix(24)
@pytest.mark.parametrize(("shape", "sequences"), [(LLAMA, 1), (LLAMA, 2), (TIED_GPT, 2)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activations.checkpointing": Checkpointing.FULL, "activations.early_stop": True},
        {"activations.checkpointing": Checkpointing.OPERATIONS},
        {"parallel.context": 2},
        {"train.float8": Float8.TENSORWISE},
    ],
)
def test_it_trains_what_plain_data_parallelism_does(
    changes: dict[str, object], shape: Architecture, sequences: int
) -> None:
    strategy = FUSED.but(changes)
    model = model_of(strategy, shape, sequences=sequences)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def test_stages_of_a_pipeline_fuse_products() -> None:
    strategy = FUSED.but({"parallel.pipeline": 2})
    model = in_blocks(model_of(strategy))
    made = make_schedule(model, strategy)
    assert not check(made, model)


def of_block(made: Schedule, block: str) -> list[CollectiveOperation]:
    """Return the collectives of tokens of a block's first micro-batch, forward and backward."""
    return [
        each
        for each in made.programs[0].step
        if isinstance(each, CollectiveOperation) and f"/mb0/{block}/" in each.id
        if each.group == "tensor" and ("/gather/" in each.id or "/scatter" in each.id)
    ]


def test_a_block_fuses_all_but_the_scatters_of_gradients() -> None:
    # Queries, keys and values are made of what is gathered, and so are gate and up; the output of
    # attention is projected to what is scattered, and so is that of the MLP. Of these two the
    # gradient is gathered. Gradients of what is read are sums of several products.
    found = of_block(made_of(FUSED), "block0")
    forward = [each for each in found if "/forward/" in each.id]
    backward = [each for each in found if "/backward/" in each.id]
    assert [type(each) for each in forward] == [AllGather, ReduceScatter] * 2
    assert [type(each) for each in backward] == [AllGather, ReduceScatter] * 2
    assert all(each.in_parts for each in forward)
    assert [each.in_parts for each in backward] == [True, False] * 2
    assert {each.stream for each in found if each.in_parts} == {"token_copies"}


def test_a_micro_batch_of_one_sequence_fuses_what_it_scatters_alone() -> None:
    found = of_block(made_of(FUSED, sequences=1), "block0")
    fused = [each for each in found if each.in_parts]
    assert [type(each) for each in fused] == [ReduceScatter] * 2
    assert all("/forward/" in each.id for each in fused)


def test_what_is_run_again_is_fused_again() -> None:
    full = {"activations.checkpointing": Checkpointing.FULL}
    again = [
        each for each in of_block(made_of(FUSED.but(full)), "block0") if "recompute" in each.id
    ]
    assert again
    assert all(each.in_parts for each in again)


@pytest.mark.parametrize("strategy", [FUSED, FUSED.but({"train.float8": Float8.TENSORWISE})])
def test_the_same_goes_over_the_wire_and_is_computed(strategy: Strategy) -> None:
    plain = strategy.but({"zero.emulate": FSDP2()})
    one, other = made_of(strategy), made_of(plain)
    assert one.contract.wire_bytes == other.contract.wire_bytes
    fused, alone = model_of(strategy), model_of(plain)
    assert fused.forward_flops == alone.forward_flops
    assert fused.backward_flops == alone.backward_flops
    assert fused != alone


def test_it_takes_the_memory_that_others_copy_from_beside() -> None:
    # Room for two times a rank's own tokens: 4 of 8, of 8 elements of two bytes.
    def peak(strategy: Strategy) -> int:
        ((_, _, peak_bytes),) = made_of(strategy).contract.peak_bytes
        return peak_bytes

    assert peak(FUSED) - peak(PLAIN) == 2 * 4 * 8 * 2


@pytest.mark.parametrize(
    "changes", [{"parallel.tensor": 1}, {"zero.emulate": FSDP2(enable_async_tensor_parallel=False)}]
)
def test_without_a_tensor_axis_or_the_option_nothing_is_fused(changes: dict[str, object]) -> None:
    made = made_of(FUSED.but(changes))
    assert "token_copies" not in made.streams
    assert not any(getattr(each, "in_parts", False) for each in made.programs[0].step)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train.compile": False}, "enable_async_tensor_parallel: true needs train.compile = true"),
        ({"train.float8": Float8.ROWWISE}, "is not modelled where tokens are cast to 8-bit floats"),
    ],
)
def test_what_it_does_not_go_with_is_named(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        FUSED.but(changes)
    FUSED.but({**changes, "parallel.tensor": 1})  # where it does nothing


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_sequence_parallel": False}, "true needs enable_sequence_parallel = true"),
        ({"input_gathers": InputGathers.LINEAR}, "true with input_gathers = linear"),
    ],
)
def test_other_options_that_it_does_not_go_with_are_named(
    options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"enable_async_tensor_parallel: {why}"):
        FSDP2(enable_async_tensor_parallel=True, **options)


def in_parts(operation: Operation, kind: type[CollectiveOperation]) -> bool:
    return isinstance(operation, kind) and operation.in_parts


def freed_too_early(operation: Operation) -> Operation:
    if isinstance(operation, Free) and operation.buffer.endswith("/summands"):
        return replace(operation, uses=())
    return operation


def from_one_place(operation: Operation) -> Operation:
    if isinstance(operation, Copy) and operation.id.endswith("/share"):
        return replace(operation, target=replace(operation.target, start=0))
    if isinstance(operation, AllGather) and operation.in_parts:
        return replace(operation, source=replace(operation.source, start=0))
    return operation


@pytest.mark.parametrize(
    ("change", "families"),
    [
        (freed_too_early, {"lifetime", "races"}),
        (from_one_place, {"races", "memory"}),
    ],
)
def test_memory_that_copies_still_use_is_found(
    change: Callable[[Operation], Operation | None], families: set[str]
) -> None:
    strategy = FUSED.but({"activations.checkpointing": Checkpointing.OPERATIONS})
    model = model_of(strategy)
    wrong = rewritten_everywhere(make_schedule(model, strategy), change)
    found = {each.invariant for each in check(wrong, model)}
    assert found & families, found


@pytest.mark.parametrize("change", [read_too_early, scattered_before_it_is_made])
def test_a_collective_in_parts_is_fused_with_a_compute(
    change: Callable[[Operation], Operation | None],
) -> None:
    made = made_of(FUSED)
    with pytest.raises(ScheduleError, match="in parts, but fused with no Compute"):
        rewritten_everywhere(made, change)


@pytest.mark.parametrize("change", [gathered_before_it_is_there, never_shared])
def test_copies_of_what_is_not_there_yet_are_found(
    change: Callable[[Operation], Operation | None],
) -> None:
    model = model_of(FUSED)
    made = make_schedule(model, FUSED)
    assert check(rewritten_everywhere(made, change), model)


def test_ranks_meet_in_parts_or_not() -> None:
    strategy, model = FUSED, model_of(FUSED)
    made = make_schedule(model, strategy)
    assert decode_value(encode_value(made, Schedule), Schedule) == made
    gather = next(each for each in made.programs[0].step if in_parts(each, AllGather))
    assert isinstance(gather, AllGather)
    assert gather.agreed != replace(gather, in_parts=False).agreed
    assert gather.words.endswith("in parts")


@pytest.mark.parametrize(("float8", "dtype"), [(None, DType.BF16), (Float8.TENSORWISE, DType.FP8)])
def test_symmetric_memory_has_the_format_of_the_tokens_that_are_gathered(
    float8: Float8 | None, dtype: DType
) -> None:
    strategy = FUSED.but({"train.float8": float8})
    model = model_of(strategy)
    (program,) = make_schedule(model, strategy).programs
    (memory,) = (each for each in program.buffers if each.name == SYMMETRIC)
    assert memory.dtype is dtype
    # Partial sums for two ranks, in bf16: one is copied while the other is computed.
    largest = max(each.elements for each in model.values.values() if each.tensor_sharded)
    assert memory.elements * dtype.size_bytes == 2 * largest * DType.BF16.size_bytes
