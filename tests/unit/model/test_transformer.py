"""The model of a transformer beside closed forms: FLOPs, parameters, what a tensor axis cuts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from drawn_shapes import architectures, wider_architectures
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.dtype import DType
from zsim.model.architecture import (
    GPT,
    Activation,
    Architecture,
    Attention,
    Llama,
    Norm,
    NormPlacement,
    QKNorm,
)
from zsim.model.architecture_error import ArchitectureError
from zsim.model.generator import Draws
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import Model, ModelError
from zsim.model.transformer import transformer
from zsim.model.transformer.block import block
from zsim.model.transformer.size import Size
from zsim.strategy.precision import Precision

GPT3 = GPT(
    layers=96,
    hidden_size=12288,
    attention_heads=96,
    sequence_length=2048,
    vocab_size=51200,
    attention=Attention.PLAIN,
)
LLAMA3_8B = Llama(
    layers=32,
    hidden_size=4096,
    attention_heads=32,
    key_value_heads=8,
    intermediate_size=14336,
    sequence_length=8192,
    vocab_size=128256,
)


def kernels(model: Model, *, backward: bool) -> list[Kernel]:
    parts = [segment for unit in model.units for segment in unit.segments]
    return [kernel for part in parts for kernel in (part.backward if backward else part.forward)]


def test_flops_of_a_gpt_are_those_of_megatron_lm() -> None:
    """Narayanan et al. 2021, appendix: 96 B s l h^2 (1 + s/6h + V/16lh), forward counted twice."""
    batch, length, layers, hidden, words = 4, 2048, 96, 12288, 51200
    with_recomputation = (
        96 * batch * length * layers * hidden**2
        + 16 * batch * length**2 * layers * hidden
        + 6 * batch * length * hidden * words
    )
    model = transformer(GPT3, micro_batch_size=batch, tensor=8, precision=Precision.FP16)
    head = 2 * batch * length * hidden * words  # is not run again
    assert 2 * model.forward_flops + model.backward_flops == with_recomputation + head
    assert model.attention_flops == 12 * batch * length**2 * layers * hidden


def test_flops_of_a_llama_are_six_for_each_weight_of_a_product_and_token() -> None:
    model = transformer(LLAMA3_8B, micro_batch_size=2, precision=Precision.BF16)
    tokens = 2 * 8192
    weights = 8_030_261_248 - 128256 * 4096 - (2 * 32 + 1) * 4096  # no embedding, no norms
    attention = 12 * 32 * 4096 * 8192 * tokens  # 12 layers x width x sequence for each token
    assert model.attention_flops == attention
    assert model.forward_flops + model.backward_flops == 6 * weights * tokens + attention


@pytest.mark.one_commit_in(6)
@given(wider_architectures(), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_backward_has_twice_the_products_of_forward(shape: Architecture, size: int) -> None:
    model = transformer(replace(shape, recompute_attention=False), micro_batch_size=size)
    forward, backward = (
        sum(each.flops for each in kernels(model, backward=way) if each.kind.multiplies_matrices)
        for way in (False, True)
    )
    assert (forward, backward) == (model.forward_flops, model.backward_flops)


@pytest.mark.one_commit_in(6)
@given(wider_architectures(), st.integers(1, 3))
@settings(deadline=None, max_examples=60)
def test_every_kernel_says_its_direction_and_products_have_the_flops_of_their_shape(
    shape: Architecture, size: int
) -> None:
    model = transformer(shape, micro_batch_size=size, precision=Precision.BF16)
    assert not any(kernel.backward for kernel in kernels(model, backward=False))
    for kernel in kernels(model, backward=True):
        again = shape.recompute_attention and shape.attention is Attention.PLAIN
        assert kernel.backward or again
    for kernel in kernels(model, backward=False):
        if kernel.kind is KernelKind.MATMUL:
            batch, m, n, k = kernel.shape
            assert kernel.flops == 2 * batch * m * n * k
            assert kernel.bytes == 2 * batch * (m * k + k * n + m * n)


def test_flash_attention_takes_time_for_half_the_scores_and_makes_them_again() -> None:
    plain, flash = (
        transformer(replace(LLAMA3_8B, layers=1, attention=each), micro_batch_size=1)
        for each in (Attention.PLAIN, Attention.FLASH)
    )
    assert plain.forward_flops == flash.forward_flops
    (forward,) = (each for each in kernels(flash, backward=False) if each.causal)
    (backward,) = (each for each in kernels(flash, backward=True) if each.causal)
    written = [each for each in kernels(plain, backward=False) if each.causal]
    assert forward.executed_flops * 2 == sum(each.executed_flops for each in written)
    # Five products instead of the four that count.
    assert backward.executed_flops * 2 == backward.flops * 5 // 4
    assert backward.flops == 2 * forward.flops


@pytest.mark.one_commit_in(9)
@given(architectures(), st.integers(1, 2))
@settings(deadline=None, max_examples=60)
def test_ranks_of_a_tensor_axis_share_parameters_products_and_what_is_kept(
    shape: Architecture, size: int
) -> None:
    """Cut in two: only norms, residual sums and padding of the vocabulary are there twice."""
    even = replace(
        shape,
        attention_heads=2 * shape.attention_heads,
        key_value_heads=2 * shape.shared_heads,
        intermediate_size=2 * shape.wide,
        vocab_size=2 * shape.vocab_size,
    )
    whole, half = (transformer(even, micro_batch_size=size, tensor=each) for each in (1, 2))
    assert half.parameter_count == whole.parameter_count
    assert half.forward_flops == whole.forward_flops
    assert half.attention_flops == whole.attention_flops
    for unit, cut in zip(whole.units[1:-1], half.units[1:-1], strict=True):
        kept = sum(segment.saved_bytes for segment in cut.segments)
        read = {name for segment in cut.segments if segment.saves_input for name in segment.inputs}
        inside = sum(
            value.size_bytes
            for segment in cut.segments
            for value in segment.outputs
            if value.name in read
        )
        norms = 2 * size * even.sequence_length * 4 * (1 if even.norm is Norm.RMS else 2)
        assert norms + 2 * (kept - norms) + inside == unit.segments[0].saved_bytes


@given(st.integers(2, 40), st.integers(1, 50), st.none() | st.integers(1, 4), st.integers(1, 5))
def test_a_window_counts_the_pairs_of_tokens_that_see_each_other(
    length: int, window: int, every: int | None, layers: int
) -> None:
    """To half a row of scores, as all causal attention is counted."""
    shape = Llama(
        layers=layers,
        hidden_size=6,
        attention_heads=3,
        sequence_length=length,
        vocab_size=5,
        window=window,
        global_every=every,
    )
    found = kernels(transformer(shape, micro_batch_size=2), backward=False)
    attention = [each for each in found if each.kind is KernelKind.ATTENTION]
    assert len(attention) == layers
    for layer, kernel in enumerate(attention):
        sees_all = every is not None and (layer + 1) % every == 0
        reach = length if sees_all else min(window, length)
        pairs = sum(min(query + 1, reach) for query in range(length))
        for_a_pair = 4 * 2 * 3 * 2  # two products, sequences, heads, elements of a head
        assert kernel.flops == for_a_pair * length * reach
        half_rows = for_a_pair * (pairs - reach / 2)
        assert half_rows - 1 <= kernel.causal_flops <= half_rows + 1
        assert kernel.bytes == attention[0].bytes  # all keys and values are read


def test_gemma_2_computes_what_its_windows_leave() -> None:
    """Half of its blocks see 4,096 of 8,192 tokens: three quarters of their scores."""
    shape = replace(LLAMA3_8B, window=4096, global_every=2)
    whole, windowed = (transformer(each, micro_batch_size=1) for each in (LLAMA3_8B, shape))
    seen, seen_whole = (each.attention_flops - each.masked_flops for each in (windowed, whole))
    assert whole.masked_flops * 2 == whole.attention_flops
    assert seen == seen_whole * 7 // 8
    assert windowed.attention_flops == whole.attention_flops * 3 // 4


def test_plain_attention_masks_what_is_outside_a_window_and_computes_it() -> None:
    plain = replace(LLAMA3_8B, layers=1, attention=Attention.PLAIN)
    windowed = replace(plain, window=64)
    assert transformer(plain, micro_batch_size=1).units == (
        transformer(windowed, micro_batch_size=1).units
    )


WRONG = {
    ("key_value_heads", 3): r"^model\.key_value_heads: 3 must divide attention_heads 32$",
    ("head_size", 127): r"^model\.head_size: 127 must be even, rotary positions turn pairs$",
    ("layers", 0): r"^model\.layers: 0 must be at least 1$",
    ("window", 0): r"^model\.window: 0 must be at least 1$",
    ("global_every", 2): r"^model\.global_every: 2 needs a window$",
    ("shared_norm", 1): r"^model\.shared_norm: true needs parallel_residual true$",
    ("position_embeddings", 9): r"^model\.position_embeddings: 9 is for positions learned",
}


@pytest.mark.parametrize("field", WRONG)
def test_a_shape_that_cannot_exist_is_refused_by_its_field(field: tuple[str, int]) -> None:
    name, value = field
    with pytest.raises(ArchitectureError, match=WRONG[field]):
        replace(LLAMA3_8B, **{name: value})  # type: ignore[arg-type]  # each field is an int


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"norm_placement": NormPlacement.AFTER}, r"^model\.norm_placement: after needs bias"),
        ({"qk_norm": QKNorm.HEAD}, r"^model\.qk_norm: head needs joined_qkv false"),
    ],
)
def test_norms_that_are_not_modelled_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ArchitectureError, match=why):
        replace(GPT3, **fields)


def test_a_sequence_needs_a_learned_position_for_each_token() -> None:
    with pytest.raises(
        ArchitectureError, match=r"^model\.sequence_length: 2048 must be at most the"
    ):
        replace(GPT3, position_embeddings=1024)


def test_a_tensor_axis_that_does_not_divide_heads_or_width_is_refused() -> None:
    for tensor, why in ((3, "attention_heads 32"), (16, "key_value_heads 8")):
        with pytest.raises(ModelError, match=rf"^parallel\.tensor: {tensor} must divide {why}$"):
            transformer(LLAMA3_8B, micro_batch_size=1, tensor=tensor)
    odd = replace(LLAMA3_8B, intermediate_size=14335)
    with pytest.raises(ModelError, match=r"^parallel\.tensor: 2 must divide intermediate_size"):
        transformer(odd, micro_batch_size=1, tensor=2)


@pytest.mark.one_commit_in(6)
@given(wider_architectures(), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=30)
def test_every_block_is_the_one_that_would_be_built_by_itself(
    shape: Architecture, tensor: int
) -> None:
    even = replace(
        shape,
        layers=3,
        qk_norm=None if shape.qk_norm is QKNorm.WIDTH and tensor > 1 else shape.qk_norm,
        activation=Activation.RELU2
        if shape.activation is Activation.XIELU and tensor > 1
        else shape.activation,
        attention_heads=2 * shape.attention_heads,
        key_value_heads=2 * shape.shared_heads,
        intermediate_size=2 * shape.wide,
    )
    size = Size(shape=even, sequences=1, tensor=tensor, dtype=DType.FP32, wide=DType.FP32)
    units = transformer(even, micro_batch_size=1, tensor=tensor).units
    for layer in range(3):
        source = units[layer].segments[-1].outputs[-1]
        local = even.is_local(layer)
        assert units[layer + 1] == block(size, f"block{layer}", source, local=local)


@pytest.mark.parametrize("attention", [Attention.PLAIN, Attention.FLASH])
def test_dropout_keeps_a_byte_of_mask_for_each_element(attention: Attention) -> None:
    """Korthikanti et al. 2022, section 4.1: 2 s b h of masks in a block, 3 a s^2 b of scores."""
    shape = replace(GPT3, layers=2, vocab_size=50, attention=attention)
    kept, without = (
        transformer(each, micro_batch_size=4, tensor=1, precision=Precision.FP16)
        for each in (replace(shape, dropout=0.1), shape)
    )
    hidden = shape.sequence_length * 4 * shape.hidden_size
    scores = shape.attention_heads * shape.sequence_length**2 * 4
    more = 3 * scores if attention is Attention.PLAIN else 16
    saved = [
        sum(segment.saved_bytes for segment in one.segments)
        - sum(segment.saved_bytes for segment in other.segments)
        for one, other in zip(kept.units, without.units, strict=True)
    ]
    assert saved == [hidden, 2 * hidden + more, 2 * hidden + more, 0]


@pytest.mark.parametrize(("sequence", "expected"), [(False, Draws.ALIKE), (True, Draws.APART)])
def test_ranks_of_the_tensor_axis_draw_alike_where_they_hold_copies(
    *, sequence: bool, expected: Draws
) -> None:
    shape = replace(GPT3, layers=1, dropout=0.1)
    model = transformer(shape, micro_batch_size=1, tensor=2, sequence=sequence)
    embedding, layer, head = model.units
    assert [segment.draws for segment in embedding.segments] == [None, expected]
    assert [segment.draws for segment in layer.segments] == [
        None,
        Draws.APART,
        expected,
        None,
        None,
        expected,
    ]
    assert all(segment.draws is None for segment in head.segments)


def test_a_probability_of_one_is_refused() -> None:
    with pytest.raises(ArchitectureError, match=r"model.dropout: 1\.0 must be at least 0"):
        replace(GPT3, dropout=1.0)


def of_kind(found: Iterable[Kernel], *kinds: KernelKind) -> Counter[Kernel]:
    return Counter(kernel for kernel in found if kernel.kind in kinds)


@pytest.mark.one_commit_in(6)
@settings(max_examples=60, deadline=None)
@given(wider_architectures(), st.sampled_from(Precision))
def test_two_parts_of_a_backward_have_its_products_and_hand_on_gradients(
    shape: Architecture, precision: Precision
) -> None:
    model = transformer(shape, micro_batch_size=1, precision=precision)
    for unit in model.units:
        sizes = {parameter.name: parameter.elements for parameter in unit.parameters}
        for segment in unit.segments:
            split = segment.split
            wanted = [name for name in segment.inputs if model.values[name].requires_gradient]
            if split is None:
                assert not wanted or not model.trained_of(segment)
                continue
            both = [*split.inputs, *split.weights]
            products = KernelKind.MATMUL, KernelKind.ATTENTION
            assert of_kind(both, *products) == of_kind(segment.backward, *products)
            # Norms read what they do twice, at most.
            others = [kernel for kernel in both if kernel.kind not in products]
            whole = [kernel for kernel in segment.backward if kernel.kind not in products]
            assert sum(each.bytes for each in others) == sum(each.bytes for each in whole)
            assert not of_kind(split.weights, KernelKind.ATTENTION, KernelKind.ACTIVATION)
            left: dict[int, int] = {}
            for number, place, size in split.input_course:
                assert number != 1, "what is saved stays"
                if number == 2:
                    assert left.setdefault(place, size) == size
            assert sum(left.values()) == split.intermediate_bytes
            for number, place, size in split.weight_course:
                if number == 2:
                    assert left.pop(place) == -size
            assert not left
            trained = sum(sizes[name] for name in model.trained_of(segment))
            made = sum(size for number, _, size in split.weight_course if number > 2)
            assert made == trained * precision.compute.size_bytes
