"""Frozen weights in 4 bits: their bytes, the kernels that dequantize them, and refusals."""

from dataclasses import replace

import pytest

from zsim.dtype import DType, Quantization
from zsim.model.architecture import Llama, LoRA
from zsim.model.architecture_error import ArchitectureError
from zsim.model.kernel import KernelKind
from zsim.model.model import Model, ModelError
from zsim.model.transformer import transformer
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Kind
from zsim.strategy.execution import Execution, Loss
from zsim.strategy.precision import Precision
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.ddp.options import DDP
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.fsdp2.options import FSDP2

LORA = LoRA(rank=4, targets=("q", "v"))
SHAPE = Llama(
    layers=2,
    hidden_size=64,
    attention_heads=4,
    sequence_length=16,
    vocab_size=128,
    intermediate_size=256,
    lora=LORA,
)


def made(lora: LoRA) -> Model:
    return transformer(replace(SHAPE, lora=lora), micro_batch_size=1, precision=Precision.BF16)


def strategy(runtime: RuntimeOptions, stage: int) -> Strategy:
    return Strategy(
        parallel=Parallel(data=2),
        zero=Zero(stage=stage, emulate=runtime),
        train=Train(precision=Precision.BF16),
    )


def test_linear_layers_of_blocks_are_quantized_and_no_others() -> None:
    model = made(replace(LORA, quantization=Quantization.NF4))
    found = {each.name for each in model.parameters if each.quantized is not None}
    layers = ("q", "k", "v", "proj", "gate", "up", "down")
    assert found == {f"block{block}.{name}.weight" for block in range(2) for name in layers}
    assert all(each.frozen for each in model.parameters if each.quantized is not None)


@pytest.mark.parametrize(
    ("kind", "bytes_each"), [("nf4", 0.5 + 4 / 64), ("nf4_double", 0.5 + 1 / 64 + 4 / (64 * 256))]
)
@pytest.mark.parametrize(
    ("runtime", "stage"), [(DDP(), 0), (DeepSpeed(), 0), (DeepSpeed(reduce_bucket_size=1000), 2)]
)
def test_quantized_weights_are_proved_and_take_half_a_byte_and_scales(
    kind: str, bytes_each: float, runtime: RuntimeOptions, stage: int
) -> None:
    model = made(replace(LORA, quantization=Quantization(kind)))
    schedule = make_schedule(model, strategy(runtime, stage))
    assert check(schedule, model) == ()
    program = schedule.programs[0]
    held = [program.by_name[name] for name in program.persistent]
    narrow = sum(each.elements for each in model.parameters if each.quantized is not None)
    stored = sum(
        each.size_bytes
        for each in held
        if each.kind is Kind.PARAMETER and each.dtype in (DType.NF4, DType.INT8)
    )
    assert stored == pytest.approx(bytes_each * narrow, rel=0.01)


def test_a_product_dequantizes_its_weight_in_both_directions() -> None:
    plain, narrow = made(LORA), made(replace(LORA, quantization=Quantization.NF4_DOUBLE))
    for units in zip(plain.units, narrow.units, strict=True):
        for one, other in zip(units[0].segments, units[1].segments, strict=True):
            weights = sum(
                name.rpartition(".")[0].rpartition(".")[2]
                in ("q", "k", "v", "proj", "gate", "up", "down")
                for name in one.parameters
            )
            assert len(other.forward) - len(one.forward) == 3 * weights
            kinds = {each.kind for each in other.forward} - {each.kind for each in one.forward}
            assert kinds <= {KernelKind.ELEMENTWISE}
            if plain.runs_backward(one):
                assert len(other.backward) > len(one.backward) or not weights
                assert other.backward_workspace_bytes >= one.backward_workspace_bytes


def test_inputs_that_bitsandbytes_kept_are_saved_on_request() -> None:
    quantized = replace(LORA, quantization=Quantization.NF4)
    saved = [
        sum(each.saved_bytes for unit in made(lora).units for each in unit.segments)
        for lora in (quantized, replace(quantized, keeps_inputs=True))
    ]
    assert saved[1] > saved[0]


@pytest.mark.parametrize("parts", [("q", "v"), ("k",), ("q", "k", "v")])
def test_parts_of_a_joined_layer_share_an_adapter_with_a_rank_each(parts: tuple[str, ...]) -> None:
    shape = replace(SHAPE, joined_qkv=True, key_value_heads=2, lora=replace(LORA, targets=parts))
    model = transformer(shape, micro_batch_size=1, precision=Precision.BF16)
    found = {each.name: each.shape for each in model.parameters if not each.frozen}
    rows = {"q": 64, "k": 32, "v": 32}
    made = {name: found[f"block0.qkv.lora_{name}.weight"] for name in "AB"}
    assert made == {"A": (4 * len(parts), 64), "B": (sum(rows[each] for each in parts), 4)}
    assert check(make_schedule(model, strategy(DDP(), 0)), model) == ()


def test_parts_and_the_whole_of_a_joined_layer_exclude_each_other() -> None:
    with pytest.raises(ArchitectureError, match="'q' must be one of qkv, proj"):
        replace(SHAPE, joined_qkv=True, lora=replace(LORA, targets=("qkv", "q")))


def test_the_head_is_quantized_on_request() -> None:
    narrow = replace(LORA, quantization=Quantization.NF4)
    for lora, found in ((narrow, None), (replace(narrow, quantizes_head=True), Quantization.NF4)):
        (weight,) = (each for each in made(lora).parameters if each.name == "head.weight")
        assert weight.quantized is found


def test_a_schedule_with_a_quantized_head_and_its_adapter_is_proved() -> None:
    lora = replace(LORA, targets=("q", "head"), quantization=Quantization.NF4, quantizes_head=True)
    model = made(lora)
    names = [each.name for each in model.parameters if not each.frozen]
    assert {"head.lora_A.weight", "head.lora_B.weight"} <= set(names)
    assert check(make_schedule(model, strategy(DDP(), 0)), model) == ()


@pytest.mark.parametrize(
    ("lora", "tied", "why"),
    [
        (LoRA(rank=4, quantizes_head=True), False, "needs model.lora.quantization"),
        (LoRA(rank=4, quantization=Quantization.NF4, quantizes_head=True), True, "an untied head"),
        (LoRA(rank=4, targets=("head",)), True, "'head' must be one of q, k"),
    ],
)
def test_a_head_that_cannot_be_adapted_is_refused(lora: LoRA, why: str, *, tied: bool) -> None:
    with pytest.raises(ArchitectureError, match=why):
        replace(SHAPE, lora=lora, tied_embeddings=tied)


def test_weights_of_another_format_are_cast_after_they_are_dequantized() -> None:
    narrow = replace(LORA, quantization=Quantization.NF4)
    one, other = (made(lora).units[1] for lora in (narrow, replace(narrow, casts_weights=True)))
    for plain, cast in zip(one.segments, other.segments, strict=True):
        layers = sum("lora" not in each and "ln" not in each for each in plain.parameters)
        assert len(cast.forward) - len(plain.forward) == layers
        assert cast.forward_workspace_bytes >= plain.forward_workspace_bytes
    assert sum(len(each.parameters) for each in one.segments) > 0


@pytest.mark.parametrize(("groups", "widths"), [(4, 5), (2, 3)])
def test_separated_heads_save_copies_and_the_joined_layer_if_values_are_a_view(
    groups: int, widths: int
) -> None:
    """Of 4 heads: 2 rotated, and the 3 that a view of the values holds; or 3 copies."""
    shape = replace(SHAPE, key_value_heads=groups, joined_qkv=True, lora=None)
    plain, apart = (
        transformer(
            replace(shape, execution=Execution(repeats_keys=repeats)),
            micro_batch_size=1,
            precision=Precision.BF16,
        ).units[1]
        for repeats in (False, True)
    )
    tokens = shape.sequence_length * 2
    joined = 64 + 2 * 64 * groups // 4
    difference = sum(each.saved_bytes for each in apart.segments) - sum(
        each.saved_bytes for each in plain.segments
    )
    assert difference == tokens * (widths * 64 - joined)


def test_the_loop_holds_inputs_and_logits_of_the_step_before() -> None:
    held = replace(LORA, quantization=Quantization.NF4, keeps_inputs=True)
    model = made(held)
    train = Train(precision=Precision.PURE_BF16, loss=Loss.CAST_CHUNKED, holds_logits=True)
    parallel, zero = Parallel(data=2), Zero(stage=0, emulate=DDP())
    chosen = Strategy(parallel=parallel, zero=zero, train=train)
    program = make_schedule(model, chosen).programs[0]
    tokens = SHAPE.sequence_length
    assert program.by_name["held_logits"].size_bytes == 4 * tokens * SHAPE.vocab_size
    inputs = 2 * (2 * 64 + 64 + 256)  # layers; norms, attention, MLP
    assert program.by_name["held_inputs"].size_bytes == 2 * tokens * inputs


def test_dropout_of_an_adapter_saves_a_mask_and_what_it_left() -> None:
    elements, adapted = 16 * 64, 2  # of the hidden state; queries and values have adapters
    plain, dropped = (
        sum(each.saved_bytes for unit in made(lora).units for each in unit.segments)
        for lora in (LORA, replace(LORA, dropout=0.05))
    )
    shared = 2 * elements  # the input that both adapters save without dropout
    masks = adapted * elements  # of the second block: the input of the first has no gradient
    assert dropped - plain == 2 * (adapted * 2 * elements - shared) + masks
    model = made(replace(LORA, dropout=0.05))
    assert check(make_schedule(model, strategy(DDP(), 0)), model) == ()


@pytest.mark.parametrize(("runtime", "stage"), [(FSDP2(), 3), (DeepSpeed(), 3)])
def test_sharded_weights_in_4_bits_are_refused(runtime: RuntimeOptions, stage: int) -> None:
    model = made(replace(LORA, quantization=Quantization.NF4))
    with pytest.raises(ModelError) as caught:
        make_schedule(model, strategy(runtime, stage))
    assert str(caught.value) == (
        "model.lora.quantization: nf4 is modelled below zero.stage 3 of ddp and deepspeed; say "
        "zero.emulate = ddp"
    )
