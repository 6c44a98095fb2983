"""Linear layers of Megatron-LM's tensor ranks that run beside collectives of their tokens."""

from collections.abc import Callable

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

from zsim.compute.roofline import joined_bytes, memory_ps, operation_ps, touched_bytes
from zsim.config_error import ConfigError
from zsim.files.installed import topology
from zsim.model.architecture import Architecture
from zsim.model.kernel import FusedPart, Kernel, KernelKind
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.json import decode_value, encode_value
from zsim.schedule.operation import (
    AllGather,
    CollectiveOperation,
    Compute,
    Copy,
    Operation,
    ReduceScatter,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule, ScheduleError
from zsim.strategy.activations import Checkpointing
from zsim.strategy.overlap_methods import ByKernel, OverlapMethods, RingExchange
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.megatron.options import Megatron

OVERLAPPED = Megatron(sequence_parallel=True, tp_comm_overlap=True)
BESIDE = Strategy(
    parallel=Parallel(data=2, tensor=2),
    zero=Zero(stage=1, emulate=OVERLAPPED),
    train=Train(gradient_accumulation_steps=2, precision=Precision.BF16, clip_norm=1.0),
)
PLAIN = BESIDE.but({"zero.emulate": Megatron(sequence_parallel=True)})
CHUNKS = OVERLAPPED.but(num_layers_per_virtual_pipeline_stage=1)


def model_of(strategy: Strategy, shape: Architecture = LLAMA, *, sequences: int = 2) -> Model:
    return fitting(replace(shape, execution=strategy.execution), strategy, sequences=sequences)


def made_of(strategy: Strategy) -> Schedule:
    return make_schedule(model_of(strategy), strategy)


@pytest.mark.matrix(24)
@pytest.mark.parametrize("shape", [LLAMA, TIED_GPT])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero.stage": 0},
        {"parallel.context": 2},
        {"parallel.context": 2, "parallel.context_exchange": "all_gather"},
        {"activations.checkpointing": Checkpointing.SELECTIVE},
        {"zero.emulate": OVERLAPPED.but(gradient_accumulation_fusion=True)},
        {"zero.emulate": OVERLAPPED.but(tp_comm_overlap_rs=False)},
    ],
)
def test_it_trains_what_plain_data_parallelism_does(
    changes: dict[str, object], shape: Architecture
) -> None:
    strategy = BESIDE.but(changes)
    model = model_of(strategy, shape)
    made = make_schedule(model, strategy)
    proves_and_trains(made, model, strategy)


@pytest.mark.parametrize("options", [OVERLAPPED, CHUNKS])
def test_stages_of_a_pipeline_run_beside_collectives_of_tokens(options: Megatron) -> None:
    strategy = BESIDE.but({"parallel.pipeline": 2, "zero.emulate": options})
    model = in_blocks(model_of(strategy, replace(LLAMA, layers=4)))
    made = make_schedule(model, strategy)
    assert not check(made, model)
    assert any(in_parts(each, AllGather) for each in made.programs[0].step)


def in_parts(operation: Operation, kind: type[CollectiveOperation]) -> bool:
    return isinstance(operation, kind) and operation.in_parts


def of_block(made: Schedule, block: str = "block0") -> list[CollectiveOperation]:
    """Return the collectives of tokens of a block's first micro-batch."""
    return [
        each
        for each in made.programs[0].step
        if isinstance(each, CollectiveOperation) and f"/mb0/{block}/" in each.id
        if each.group == "tensor" and ("/gather/" in each.id or "/scatter" in each.id)
    ]


def test_every_collective_of_a_block_s_tokens_is_beside_a_product() -> None:
    # Forward of attention and MLP gather what they read and scatter what they make. Backward
    # gathers the gradient of the latter, then what was read, which is not kept, and scatters the
    # gradient of that.
    found = of_block(made_of(BESIDE))
    assert all(each.in_parts for each in found)
    assert {each.stream for each in found} == {"token_copies"}
    forward = [type(each) for each in found if "/forward/" in each.id]
    backward = [type(each) for each in found if "/backward/" in each.id]
    assert forward == [AllGather, ReduceScatter] * 2
    assert backward == [AllGather, AllGather, ReduceScatter] * 2
    plain = of_block(made_of(PLAIN))
    assert not any(each.in_parts for each in plain)
    assert len(plain) == len(found)


def test_head_and_embedding_are_no_linear_layers_of_transformer_engine() -> None:
    for block in ("embedding", "head"):
        found = of_block(made_of(BESIDE), block)
        assert found
        assert not any(each.in_parts for each in found)


def test_the_same_goes_over_the_wire_and_is_computed() -> None:
    one, other = made_of(BESIDE), made_of(PLAIN)
    assert one.contract.wire_bytes == other.contract.wire_bytes
    fused, alone = model_of(BESIDE), model_of(PLAIN)
    assert fused.forward_flops == alone.forward_flops
    assert fused.backward_flops == alone.backward_flops


def test_each_product_of_attention_and_of_an_mlp_has_a_buffer_of_all_tokens() -> None:
    # Ten products, each of 8 tokens of 8 elements of two bytes.
    made = made_of(BESIDE)
    buffers = [each for each in made.programs[0].buffers if each.name.startswith("userbuffers/")]
    assert len(buffers) == 10
    assert {each.elements * each.dtype.size_bytes for each in buffers} == {8 * 8 * 2}


def products(model: Model, place: int, *, backward: bool = False) -> list[Kernel]:
    """Return the products of a segment of the first block."""
    unit = next(each for each in model.units if each.name == "block0")
    segment = unit.segments[place]
    kernels = segment.backward if backward else segment.forward
    return [each for each in kernels if each.kind is KernelKind.MATMUL]


ATTENTION, MLP = 1, 4


def test_products_are_cut_as_the_methods_of_userbuffers_cut_them() -> None:
    # Of width 8 with 4 elements for each of two ranks' query, key and value: 12 outputs, of which
    # four tokens of each rank are made at a time; then quarters of the 8 outputs of all 8 tokens.
    forward = products(model_of(BESIDE), ATTENTION)
    shapes = [(each.part, each.shape, each.spared) for each in forward]
    gathered = (FusedPart.GATHERED, (1, 4, 12, 8), 0)
    assert shapes == [gathered] * 2 + [(FusedPart.SPLIT, (1, 8, 2, 4), 16)] * 4
    # gradients: of the attended for each rank's tokens, of the weight behind it, then of what was
    # read while that is gathered, of the first weights while it is scattered
    backward = products(model_of(BESIDE), ATTENTION, backward=True)
    assert [(each.part, each.shape, each.spared) for each in backward] == [
        *[(FusedPart.GRADIENT, (1, 4, 4, 8), 0)] * 2,
        (None, (1, 8, 4, 8), 0),
        (FusedPart.BESIDE_GATHER, (1, 8, 8, 12), 16),
        (FusedPart.BESIDE_SCATTER, (1, 12, 8, 8), 16),
    ]


def test_outputs_may_be_scattered_behind_the_last_layer() -> None:
    whole = BESIDE.but({"zero.emulate": OVERLAPPED.but(tp_comm_overlap_rs=False)})
    assert [each.part for each in products(model_of(whole), ATTENTION)] == [
        FusedPart.GATHERED,
        FusedPart.GATHERED,
        None,
    ]
    found = of_block(made_of(whole))
    forward = {each.stream for each in found if "/forward/" in each.id and "/scatter" in each.id}
    assert forward == {"compute"}
    # backward is as ever
    assert [each for each in found if "/backward/" in each.id] == [
        each for each in of_block(made_of(BESIDE)) if "/backward/" in each.id
    ]
    with pytest.raises(ConfigError, match="tp_comm_overlap_rs: false needs tp_comm_overlap = true"):
        Megatron(sequence_parallel=True, tp_comm_overlap_rs=False)


def test_gate_and_up_are_one_product() -> None:
    # 16 of each for either rank
    first = products(model_of(BESIDE), MLP)[0]
    assert first.shape == (1, 4, 2 * 16, 8)


def test_each_product_is_as_its_method_says() -> None:
    methods = OverlapMethods(
        fc1_wgrad=ByKernel(num_sm=4, set_sm_margin=False),
        fc2_fprop=ByKernel(num_sm=8),
        fc2_dgrad=RingExchange(aggregate=True),
    )
    strategy = BESIDE.but({"zero.emulate": OVERLAPPED.but(tp_comm_overlap_cfg=methods)})
    spared = {each.part: each.spared for each in products(model_of(strategy), MLP)}
    assert spared == {FusedPart.GATHERED: 0, FusedPart.SPLIT: 8}
    backward = products(model_of(strategy), MLP, backward=True)
    parts = {each.part: each for each in backward}
    assert parts[FusedPart.BESIDE_SCATTER].spared == 0
    assert parts[FusedPart.BESIDE_GATHER].spared == 16
    # two ranks' tokens at a time
    gradients = [each for each in backward if each.part is FusedPart.GRADIENT]
    assert [each.shape for each in gradients] == [(1, 8, 16, 8)]
    attention = {each.part: each.spared for each in products(model_of(strategy), ATTENTION)}
    assert attention[FusedPart.SPLIT] == 16


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel.tensor": 1}, "true needs parallel.tensor of at least 2"),
        (
            {"activations.checkpointing": Checkpointing.FULL},
            "true is not modelled with activations.checkpointing = full",
        ),
    ],
)
def test_what_it_does_not_go_with_is_named(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=f"zero.megatron.tp_comm_overlap: {why}"):
        BESIDE.but(changes)


def test_without_sequence_parallelism_it_is_refused_and_methods_without_it() -> None:
    with pytest.raises(ConfigError, match="tp_comm_overlap: true needs sequence_parallel = true"):
        Megatron(tp_comm_overlap=True)
    methods = OverlapMethods(qkv_fprop=RingExchange(aggregate=True))
    with pytest.raises(ConfigError, match="tp_comm_overlap_cfg: needs tp_comm_overlap = true"):
        Megatron(sequence_parallel=True, tp_comm_overlap_cfg=methods)


def test_gradients_that_products_add_are_copied_by_no_kernel() -> None:
    def launches(*, fused: bool) -> set[int]:
        options = OVERLAPPED.but(gradient_accumulation_fusion=fused)
        step = made_of(BESIDE.but({"zero.emulate": options})).programs[0].step
        return {
            each.launches for each in step if isinstance(each, Copy) and "/add/bucket" in each.id
        }

    assert launches(fused=True) == {0}
    assert launches(fused=False) == {1}


def test_products_that_add_gradients_move_what_they_collect_and_write_none_of_their_own() -> None:
    # Gradients of two bytes added to fp32 by another kernel: one reads two, four, writes four; the
    # product reads four and writes four instead of two.
    gpu = topology("dgx_a100_infiniband", None, 1).gpu
    options = OVERLAPPED.but(gradient_accumulation_fusion=True, grad_reduce_in_fp32=True)
    program = made_of(BESIDE.but({"zero.emulate": options})).programs[0]
    fused = next(
        each for each in program.step if isinstance(each, Copy) and "/add/bucket" in each.id
    )
    moved = joined_bytes(fused, program)
    assert moved == 6 * fused.source.size
    assert touched_bytes(fused, program) == 10 * fused.source.size
    assert operation_ps(fused, program, gpu) == memory_ps(moved, gpu)


def summed_too_early(operation: Operation) -> Operation:
    if isinstance(operation, Compute | Copy):
        after = tuple(edge for edge in operation.after if "/scatter" not in str(edge))
        return replace(operation, after=after)
    return operation


def own_part_of_another(operation: Operation) -> Operation:
    if isinstance(operation, Copy) and operation.id.endswith("/own"):
        return replace(operation, source=replace(operation.source, axis=None))
    return operation


@pytest.mark.parametrize(
    "change", [summed_too_early, gathered_before_it_is_there, never_shared, own_part_of_another]
)
def test_what_is_read_before_it_is_there_is_found(
    change: Callable[[Operation], Operation | None],
) -> None:
    model = model_of(BESIDE)
    assert check(rewritten_everywhere(make_schedule(model, BESIDE), change), model)


@pytest.mark.parametrize("change", [read_too_early, scattered_before_it_is_made])
def test_a_collective_in_parts_is_beside_a_compute(
    change: Callable[[Operation], Operation | None],
) -> None:
    with pytest.raises(ScheduleError, match="in parts, but fused with no Compute"):
        rewritten_everywhere(made_of(BESIDE), change)


def test_a_file_has_all_of_it() -> None:
    made = made_of(BESIDE)
    assert decode_value(encode_value(made, Schedule), Schedule) == made
