"""Weights that FSDP2 casts to 8-bit floats before it gathers them, and their scales."""

from collections.abc import Callable

import pytest
from exact_training import STEPS, proves_and_trains, trained
from faults.schedules import dropped, everywhere, rewritten, shifted
from fitting import fitting

import zsim
from zsim.api.run_result import RunResult
from zsim.config_error import ConfigError
from zsim.dtype import DType
from zsim.model.architecture import GPT, Architecture, Llama, LoRA
from zsim.model.kernel import KernelKind
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Compute,
    Copy,
    Operation,
    Previous,
    Reduction,
    Role,
    Together,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Float8
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des.values import train
from zsim_runtimes.fsdp2.options import FSDP2, OffloadPolicy, PipelineSchedule, Sync

LLAMA = Llama(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=6)
BIASED = GPT(layers=2, hidden_size=8, attention_heads=2, sequence_length=4, vocab_size=7)
ADAPTED = replace(LLAMA, lora=LoRA(rank=2))
GATHERS = Strategy(
    parallel=Parallel(data=2),
    zero=Zero(stage=3, emulate=FSDP2(enable_fsdp_float8_all_gather=True)),
    train=Train(
        gradient_accumulation_steps=2,
        precision=Precision.BF16,
        clip_norm=1.0,
        float8=Float8.TENSORWISE,
    ),
)
WIDE = GATHERS.but({"zero.emulate": FSDP2()})


def model_of(strategy: Strategy, shape: Architecture = LLAMA) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy)


def made_of(strategy: Strategy, shape: Architecture = LLAMA) -> Schedule:
    return make_schedule(model_of(strategy, shape), strategy)


def with_options(**options: object) -> dict[str, object]:
    return {"zero.emulate": FSDP2(enable_fsdp_float8_all_gather=True, **options)}  # type: ignore[arg-type]  # by name


@pytest.mark.matrix(8)
@pytest.mark.parametrize("shape", [LLAMA, BIASED, ADAPTED])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel.data": 3, "parallel.replicate": 2},
        {"parallel.data": 1},
        {"parallel.tensor": 2, "activations.checkpointing": Checkpointing.FULL},
        {"train.precision": Precision.FP16, "train.compile": True},
        {"train.precision": Precision.PURE_BF16},
        {"activations.checkpointing": Checkpointing.OPERATIONS, "train.compile": True},
        with_options(reshard_after_forward=False, gradient_sync=Sync.LAST),
        with_options(reshard_root_after_forward=True, reshard_after_backward=False),
        with_options(forward_prefetch=1, reduce_dtype=DType.FP32),
    ],
)
def test_it_trains_what_plain_data_parallelism_does(
    changes: dict[str, object], shape: Architecture
) -> None:
    strategy = GATHERS.but(changes)
    if shape is ADAPTED:  # which tensor ranks have not
        strategy = strategy.but({"parallel.tensor": 1})
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


def sent(made: Schedule, collective: str) -> int:
    assert made.contract.wire_bytes is not None
    return sum(
        each.bytes
        for each in made.contract.wire_bytes
        if (each.group, each.collective, each.scalar) == ("data", collective, False)
    )


def test_weights_of_blocks_take_one_byte_on_the_wire_and_the_rest_two() -> None:
    # A block of LLAMA: q, k, v, o of 8 x 8, and gate, up, down of 8 x `wide`; two norms of 8.
    # Outside, embedding and head of 6 x 8, a norm of 8. Of two ranks each sends half of it: 6 rows
    # are 3 each. Two micro-batches gather each block for forward and for backward, the root once.
    narrow = 4 * 64 + 3 * 8 * LLAMA.wide
    blocks = 2 * (narrow * 1 + 16 * 2) // 2
    root = (48 + 48 + 8) * 2 // 2
    assert sent(made_of(GATHERS), "all_gather") == 2 * (2 * blocks + root)
    assert sent(made_of(WIDE), "all_gather") == 2 * (2 * (blocks + 2 * narrow // 2) + root)


def test_all_scales_are_one_all_reduce_a_step() -> None:
    # 7 weights in each of 2 blocks, in fp32: as a ring of 2, half of 14 numbers there and back.
    made = made_of(GATHERS)
    assert sent(made, "all_reduce") == 2 * 7 * 4
    assert sent(made_of(WIDE), "all_reduce") == 0
    (program,) = made.programs
    maxima = [each for each in program.step if _is_maximum(each)]
    assert [each.id for each in maxima] == ["step/update/amax/reduce/data"]


def _is_maximum(each: Operation) -> bool:
    return isinstance(each, AllReduce) and each.reduction is Reduction.MAX


def test_a_block_is_gathered_by_one_operation_in_two_formats() -> None:
    (program,) = made_of(GATHERS).programs
    both = [each for each in program.step if isinstance(each, Together)]
    assert {tuple(member.wire for member in each.members) for each in both} == {
        (DType.FP8, DType.BF16)
    }
    alone = {each.wire for each in program.step if isinstance(each, AllGather)}
    assert alone == {DType.BF16}  # of the root


def test_whole_weights_take_a_byte_each() -> None:
    (program,) = made_of(GATHERS).programs
    by_name = program.by_name
    assert by_name["narrow_bucket1/whole"].size_bytes == 4 * 64 + 3 * 8 * LLAMA.wide
    assert by_name["wide_bucket1/whole"].size_bytes == 16 * 2
    ((_, _, narrow),) = made_of(GATHERS).contract.peak_bytes
    ((_, _, wide),) = made_of(WIDE).contract.peak_bytes
    assert narrow < wide


def test_a_weight_that_comes_in_float8_is_not_cast_again_but_turned_for_backward() -> None:
    def moved_bytes(strategy: Strategy, *, backward: bool) -> int:
        (block,) = model_of(strategy).units[1].segments
        kernels = block.backward if backward else block.forward
        return sum(
            each.bytes
            for each in kernels
            if each.kind is KernelKind.ELEMENTWISE and each.dtype is DType.FP8
        )

    weights = 4 * 64 + 3 * 8 * LLAMA.wide
    # A cast reads two bytes twice and writes one; a copy reads one and writes one.
    for backward, less in ((False, 5), (True, 5 - 2)):
        both = (moved_bytes(each, backward=backward) for each in (WIDE, GATHERS))
        assert next(both) - next(both) == less * weights


Change = Callable[[Operation], tuple[Operation, ...]]


def changed(change: Callable[[Operation], Operation | None]) -> Callable[[Program], Program]:
    def each(operation: Operation) -> tuple[Operation, ...]:
        made = change(operation)
        return () if made is None else (made,)

    return lambda program: rewritten(program, each)


def measures_less(operation: Operation) -> Operation:
    """Measure one element less of a weight, in the step."""
    if not (isinstance(operation, Compute) and operation.action is Action.AMAX):
        return operation
    first, *others = operation.operands
    assert first.role is Role.PARAMETER
    smaller = replace(first, view=replace(first.view, size=first.view.size - 1))
    return replace(operation, operands=(smaller, *others))


def adds_up(operation: Operation) -> Operation:
    if isinstance(operation, AllReduce) and operation.reduction is Reduction.MAX:
        return replace(operation, reduction=Reduction.SUM)
    return operation


READY = Previous("step/update/amax/reduce/data")


def waits_for(edge: Previous) -> Callable[[Operation], Operation]:
    """Let casts wait for another operation of the step before than the scale."""

    def change(operation: Operation) -> Operation:
        if isinstance(operation, Copy) and operation.after == (READY,):
            return replace(operation, after=(edge,))
        return operation

    return change


def measured_alone(program: Program) -> Program:
    """Reduce no scale in the step, which casts do not wait for then."""
    change = changed(waits_for(Previous("step/update/amax")))
    return dropped(change(program), READY.operation)


@pytest.mark.matrix(4)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (measured_alone, "is not reduced over"),
        (lambda program: dropped(program, "setup/amax/reduce/data"), "is not reduced over"),
        (
            lambda program: shifted(
                program, "step/update/amax", before="step/update/bucket1/update"
            ),
            "measured before all of it is written",
        ),
        (changed(measures_less), "nothing measures its largest magnitude"),
        (changed(adds_up), "makes something else of its largest magnitude"),
        (
            changed(waits_for(Previous("step/update/bucket2/update"))),
            "casts before the scale is known",
        ),
    ],
)
def test_a_scale_that_is_not_of_the_whole_weight_is_found(
    change: Callable[[Program], Program], why: str
) -> None:
    model = model_of(GATHERS)
    wrong = everywhere(make_schedule(model, GATHERS), change)
    found = [each.why for each in check(wrong, model) if each.invariant == "scales"]
    assert found
    assert all(why in each for each in found), found


def test_what_the_contract_does_not_name_may_not_be_narrow() -> None:
    """Norms in 8 bits, or weights where nothing says that they are gathered so."""
    model = model_of(GATHERS)
    made = make_schedule(model, GATHERS)
    parameters = tuple(replace(each, float8=False) for each in made.contract.parameters)
    silent = replace(made, contract=replace(made.contract, parameters=parameters))
    found = {each.why for each in check(silent, model) if each.invariant == "formats"}
    assert "reads parameters in fp8, and not in bf16" in found
    (program,) = made.programs
    narrow = tuple(
        replace(each, dtype=DType.FP8) if each.name.startswith("wide_bucket") else each
        for each in program.buffers
    )
    gathers = changed(
        lambda each: (
            replace(each, members=tuple(replace(own, wire=DType.FP8) for own in each.members))
            if isinstance(each, Together)
            else each
        )
    )
    edited = everywhere(made, lambda each: gathers(replace(each, buffers=narrow)))
    found = {each.why for each in check(edited, model) if each.invariant == "formats"}
    assert "gathers in fp8, and not in bf16" in found


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"train.float8": None}, "true needs train.float8 = tensorwise"),
        ({"train.float8": Float8.ROWWISE}, "true needs train.float8 = tensorwise"),
    ],
)
def test_it_needs_one_scale_for_a_weight(changes: dict[str, object], why: str) -> None:
    field = "zero.fsdp2.enable_fsdp_float8_all_gather"
    with pytest.raises(ConfigError, match=f"{field}: {why}"):
        GATHERS.but(changes)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"reshard_after_forward": 2}, "true with reshard_after_forward = 2: PyTorch refuses it"),
        ({"offload_policy": OffloadPolicy.CPU}, "true with offload_policy = cpu: is not modelled"),
    ],
)
def test_what_does_not_go_with_it_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=f"enable_fsdp_float8_all_gather: {why}"):
        with_options(**options)


KEPT = {"reshard_after_forward": False}
CHUNKS = {"pipeline_schedule": PipelineSchedule.INTERLEAVED, **KEPT}


@pytest.mark.matrix(8)
@pytest.mark.parametrize(
    ("options", "chunks"), [({}, 1), (KEPT, 1), (CHUNKS, 2)], ids=["freed", "kept", "two chunks"]
)
@pytest.mark.parametrize("changes", [{}, {"parallel.tensor": 2}, {"parallel.replicate": 2}])
def test_stages_of_a_pipeline_have_scales_of_each_chunk(
    options: dict[str, object], changes: dict[str, object], chunks: int
) -> None:
    strategy = GATHERS.but({**with_options(**options), "parallel.pipeline": 2}).but(changes)
    model = in_blocks(model_of(strategy, replace(LLAMA, layers=6)))  # every chunk has some
    made = make_schedule(model, strategy)
    assert not check(made, model)
    for program in made.programs:
        reduced = [each.id for each in program.step if _is_maximum(each) and "amax" in each.id]
        over_data = [each for each in reduced if each.startswith("step/update/amax")]
        assert len([each for each in over_data if each.endswith("/data")]) == chunks
    result = trained(made, model, train(model, strategy, STEPS))
    assert result.is_right, result


def test_a_step_whose_gathers_are_exposed_is_faster_and_takes_less_memory() -> None:
    def run(*, gathers: bool) -> RunResult:
        return zsim.run(
            {
                "title": "eight blocks on two nodes",
                "model": {
                    "architecture": "llama",
                    "layers": 8,
                    "hidden_size": 4096,
                    "attention_heads": 32,
                    "sequence_length": 2048,
                    "vocab_size": 32000,
                },
                "cluster": {"topology": "dgx_h100_infiniband", "nodes": 2},
                "compute": {"profile": "h100"},
                "network": {"profile": "h100"},
                "parallel": {},
                "zero": {
                    "emulate": "fsdp2",
                    "fsdp2": {"enable_fsdp_float8_all_gather": gathers},
                },
                "train": {
                    "micro_batch_size": 1,
                    "gradient_accumulation_steps": 1,
                    "precision": "bf16",
                    "float8": "tensorwise",
                },
            }
        )

    wide, narrow = run(gathers=False), run(gathers=True)
    assert narrow.exposed_communication_s < wide.exposed_communication_s
    # Less than what is exposed is saved at least: weights are not cast as a whole any more.
    saved_s = wide.exposed_communication_s - narrow.exposed_communication_s
    assert narrow.step_time_s < wide.step_time_s - saved_s
    assert narrow.peak_allocated_bytes < wide.peak_allocated_bytes
