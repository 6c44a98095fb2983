"""Routed experts: their kernels, the bytes that they save, and what a binding of counts changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_by_autograd import kept_by_autograd
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from zsim.dtype import DType
from zsim.model.architecture import Llama
from zsim.model.architecture_error import ArchitectureError
from zsim.model.expert_transport import ExpertChoice
from zsim.model.experts import ExpertKernels, Experts, Latent, RouterFormat, Scores
from zsim.model.kernel import Kernel, KernelKind, bound, grouped_matmul
from zsim.model.model import Model, ModelError, Parameter, Unit, Value
from zsim.model.narrow_products import format_of
from zsim.model.token_loads import TokenLoads, balanced, loads_of
from zsim.model.transformer import transformer
from zsim.model.transformer.expert_rows import padded
from zsim.model.transformer.mixture import mixture
from zsim.model.transformer.operator import Stretch, Tensor
from zsim.model.transformer.size import Size
from zsim.strategy.execution import DispatchLibrary, Execution, Float8, Quantizer, TokenDispatch
from zsim.strategy.precision import Precision

COMPILED = Execution(compiled=True)
TOKENS = 4096
SMALL = Experts(count=8, top_k=2, intermediate_size=48)


def shape_of(experts: Experts, *, hidden: int = 64, execution: Execution = COMPILED) -> Llama:
    return Llama(
        layers=1,
        hidden_size=hidden,
        attention_heads=4,
        sequence_length=TOKENS,
        vocab_size=128,
        intermediate_size=96,
        experts=experts,
        execution=execution,
    )


def size_of(shape: Llama, *, precision: Precision = Precision.BF16) -> Size:
    return Size(shape=shape, sequences=1, tensor=1, dtype=precision.compute, wide=precision.wide)


def layer_of(shape: Llama, precision: Precision = Precision.BF16) -> Stretch:
    size = size_of(shape, precision=precision)
    (stretch,) = mixture(size, size.value("normed"), size.value("output"), "block0")
    return stretch


def saved(stretch: Stretch) -> dict[str, Tensor]:
    tensors = {each.name: each for operator in stretch.operators for each in operator.saves}
    return {name.removeprefix("block0/experts/"): each for name, each in tensors.items()}


def products(kernels: Sequence[Kernel]) -> int:
    return sum(each.flops for each in kernels if each.kind is KernelKind.GROUPED_MATMUL)


def forward(stretch: Stretch) -> list[Kernel]:
    return [kernel for operator in stretch.operators for kernel in operator.forward]


MIXTRAL = shape_of(Experts(count=8, top_k=2, intermediate_size=14_336), hidden=4096)
QWEN3 = shape_of(Experts(count=128, top_k=8, intermediate_size=768), hidden=2048)
DEEPSEEK = shape_of(
    Experts(
        count=256,
        top_k=8,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        scores=Scores.SIGMOID,
        groups=8,
        top_groups=4,
        router_format=RouterFormat.FP32,
    ),
    hidden=7168,
)


@pytest.mark.parametrize(
    ("shape", "flops", "held", "ranks", "parameters"),
    [
        (MIXTRAL, 2.886e12, (67, 470, 235), 8, 176.2e6),
        (QWEN3, 0.309e12, (134, 101, 50), 8, 75.5e6),
        (DEEPSEEK, 2.886e12, (470, 268, 134), 64, 176.2e6),
    ],
    ids=["mixtral", "qwen3", "deepseek-v3"],
)
def test_a_layer_of_4096_tokens_has_the_products_and_tensors_of_its_formulas(
    shape: Llama, flops: float, held: tuple[int, int, int], ranks: int, parameters: float
) -> None:
    """The formulas: 6 T k H F; T k H, 2 T k F and T k F elements of two bytes; 3 E H F."""
    experts, hidden = shape.experts, shape.hidden_size
    assert experts is not None
    stretch, inner = layer_of(shape), experts.intermediate_size
    copies = TOKENS * experts.top_k
    assert products(forward(stretch)) == 6 * copies * hidden * inner
    assert round(products(forward(stretch)) / 1e9) == round(flops / 1e9)
    kept = saved(stretch)
    sizes = [kept[name].size_bytes for name in ("permuted", "fc1", "product")]
    assert sizes == [2 * copies * hidden, 4 * copies * inner, 2 * copies * inner]
    assert tuple(round(each / 1e6) for each in sizes) == held
    assert "fc2" not in kept  # weights multiply before it
    stacked = [each for operator in stretch.operators for each in operator.parameters]
    count = sum(each.elements for each in stacked if each.experts)
    assert count == 3 * experts.count * hidden * inner
    assert count / ranks == pytest.approx(parameters, rel=1e-3)


def test_a_shared_expert_and_a_router_have_the_products_of_their_formulas() -> None:
    stretch = layer_of(DEEPSEEK)
    plain = [each for each in forward(stretch) if each.kind is KernelKind.MATMUL]
    router, *shared = plain
    assert router.flops == 2 * TOKENS * 7168 * 256  # 15.0 G
    assert router.dtype is DType.BF16  # compiled: 16-bit operands, and an output in fp32
    logits = TOKENS * 256
    assert router.bytes == 2 * (TOKENS + 256) * 7168 + 4 * logits
    assert sum(each.flops for each in shared) == 6 * TOKENS * 7168 * 2048  # 0.361 T
    kept = saved(stretch)
    shared_bytes = [kept[f"block0/shared/{part}"].size_bytes for part in ("gate", "up", "product")]
    assert sum(shared_bytes) == 2 * TOKENS * 3 * 2048


def test_a_router_in_fp32_casts_its_source_for_backward() -> None:
    wide, plain = (
        layer_of(shape_of(replace(SMALL, router_format=each)))
        for each in (RouterFormat.FP32, RouterFormat.COMPUTE)
    )
    backward = [
        [kernel for each in stretch.operators for kernel in (*each.backward, *each.trains)]
        for stretch in (wide, plain)
    ]
    casts, products = (
        [each for each in backward[0] if each.kind is kind and each.shape != ()]
        for kind in (KernelKind.ELEMENTWISE, KernelKind.MATMUL)
    )
    assert {each.dtype for each in products} == {DType.FP32}
    assert len(backward[0]) == len(backward[1]) + 1
    assert any(each.bytes == TOKENS * 64 * (2 + 4) for each in casts)


def rows_moved(execution: Execution, *, count: int = 8) -> list[int]:
    """Return elements of rows that forward moves outside products and activations, by stretch."""
    experts = Experts(count=count, top_k=2, intermediate_size=48)
    size = size_of(shape_of(experts, execution=execution))
    stretches = mixture(size, size.value("normed"), size.value("output"), "block0")
    found: list[int] = []
    for stretch in (each for each in stretches if each.loads is None):
        kernels = [kernel for each in stretch.operators for kernel in each.forward]
        moves = [each for each in kernels if each.kind is KernelKind.ELEMENTWISE]
        found.append(sum(each.bytes // 2 for each in moves if each.shape[-1] == 64))
    return found


def test_ranks_with_several_experts_sort_received_rows_and_sort_them_back() -> None:
    rows, copied = 64 * 2 * TOKENS, 64 * 3 * TOKENS
    several, one = (rows_moved(replace(COMPILED, expert=4), count=count) for count in (8, 4))
    assert several == [copied, 2 * 2 * rows, copied]
    assert one == [copied, 0, copied]


@pytest.mark.parametrize("library", DispatchLibrary)
def test_a_library_copies_tokens_for_their_experts_after_they_arrive(
    library: DispatchLibrary,
) -> None:
    dispatch = TokenDispatch(library=library, num_sms=20)
    moved = rows_moved(replace(COMPILED, expert=4, dispatch=dispatch))
    places = ExpertChoice(experts=8, top_k=2).places(4)
    arrived = 64 * (2 * TOKENS + round(TOKENS * places))
    assert moved == [0, 2 * arrived, 0]


def test_narrow_products_pad_rows_unless_the_library_does() -> None:
    te = replace(COMPILED, recipe=Float8.BLOCKWISE, quantizer=Quantizer.TRANSFORMER_ENGINE)
    rows = 64 * 2 * TOKENS
    for library, pads in ((DispatchLibrary.DEEPEP, 2 * 2 * rows), (DispatchLibrary.HYBRIDEP, 0)):
        dispatch = TokenDispatch(library=library, num_sms=20)
        wide = replace(COMPILED, expert=4, dispatch=dispatch)
        narrow = replace(te, expert=4, dispatch=dispatch)
        cast = rows * (2 + 2 * (1 + 4 / 128)) / 2  # of the first product, along both axes
        assert rows_moved(narrow)[1] - rows_moved(wide)[1] == pytest.approx(pads + cast, abs=2)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 300)), min_size=1, max_size=4),
    st.sampled_from((16, 32, 128)),
)
def test_padded_rows_are_the_next_multiple_for_each_expert(
    groups: list[tuple[int, int]], multiple: int
) -> None:
    loads = TokenLoads(groups=tuple(groups))
    found = padded(loads, multiple)
    for (_, rows), (_, more) in zip(loads.groups, found.groups, strict=True):
        assert more % multiple == 0
        assert rows <= more < rows + multiple


@pytest.mark.parametrize("recipe", [None, Float8.BLOCKWISE, Float8.MXFP8, Float8.DELAYED])
def test_grouped_products_are_in_the_format_of_the_recipe(recipe: Float8 | None) -> None:
    te = replace(COMPILED, recipe=recipe, quantizer=Quantizer.TRANSFORMER_ENGINE)
    stretch = layer_of(shape_of(SMALL, execution=te))
    kernels = [k for each in stretch.operators for k in (*each.forward, *each.backward)]
    grouped = [each for each in kernels if each.kind is KernelKind.GROUPED_MATMUL]
    assert {each.dtype for each in grouped} == {DType.BF16 if not recipe else format_of(recipe)}
    assert {each.block_scaled for each in grouped} == {recipe is Float8.BLOCKWISE}


def test_scores_and_weights_of_all_experts_hold_eight_bytes_each() -> None:
    kept = saved(layer_of(shape_of(replace(SMALL, auxiliary_loss=False))))
    assert kept["scores"].size_bytes + kept["dense"].size_bytes == 8 * TOKENS * SMALL.count
    assert kept["map"].size_bytes == TOKENS * SMALL.count


@pytest.mark.parametrize("kernels", ["grouped_mm", "eager"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_layer_saves_the_bytes_that_autograd_does_for_transformers(
    kernels: str, top_k: int
) -> None:
    """In fp32, since transformers casts the weights of experts back and forth in other formats."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 48, "num_local_experts": 8}
    sizes |= {"num_experts_per_tok": top_k, "experts_implementation": kernels}
    torch.manual_seed(0)
    made: Callable[[MixtralConfig], nn.Module] = MixtralSparseMoeBlock
    layer = made(MixtralConfig(**sizes))
    for each in layer.parameters():
        nn.init.normal_(each)
    source = torch.randn(1, TOKENS, 64, requires_grad=True)
    of_autograd, _ = kept_by_autograd(layer, [source])
    loop = ExpertKernels.LOOP if kernels == "eager" else ExpertKernels.GROUPED
    experts = replace(SMALL, top_k=top_k, kernels=loop, auxiliary_loss=False)
    stretch = layer_of(shape_of(experts, execution=Execution()), Precision.FP32)
    counted = {name: each for name, each in saved(stretch).items() if name != "normed"}
    assert sum(each.size_bytes for each in counted.values()) == of_autograd


@given(st.lists(st.integers(0, 300), min_size=8, max_size=8).filter(any))
def test_a_binding_gives_the_kernels_of_a_model_that_was_built_with_its_counts(
    counts: list[int],
) -> None:
    """So a later binding of counts replaces those of a balanced model."""
    loads = loads_of(counts)
    size = size_of(shape_of(SMALL))
    source, output = size.value("normed"), size.value("output")
    (built,) = mixture(replace(size, loads=loads), source, output, "block0")
    (even,) = mixture(size, source, output, "block0")
    assert loads.total == sum(counts)
    assert loads.busy == len([each for each in counts if each])
    for way in ("forward", "backward", "trains"):
        for first, second in zip(even.operators, built.operators, strict=True):
            rebound = [bound(each, loads) for each in getattr(first, way)]
            for one, other in zip(rebound, getattr(second, way), strict=True):
                if one.kind is KernelKind.GROUPED_MATMUL:
                    assert one == other
                else:
                    assert (one.kind, one.shape) == (other.kind, other.shape)


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_balanced_loads_differ_by_at_most_one_copy(copies: int, experts: int) -> None:
    loads = balanced(copies, experts)
    assert (loads.total, loads.experts) == (copies, experts)
    assert loads.most - min(each for _, each in loads.groups) <= 1


def test_other_counts_do_not_change_a_kernel_of_another_name() -> None:
    kernel = grouped_matmul(balanced(64, 8), 32, 16, DType.BF16)
    other = TokenLoads(groups=((8, 9),), name="other")
    assert bound(kernel, other) is kernel
    assert bound(replace(kernel, loads=None), other).loads is None


def test_a_loop_over_experts_has_the_same_products_in_more_kernels() -> None:
    grouped, loop = (
        forward(layer_of(shape_of(replace(SMALL, kernels=each), execution=Execution())))
        for each in (ExpertKernels.GROUPED, ExpertKernels.LOOP)
    )
    assert (
        products(grouped)
        == sum(each.flops for each in loop if each.kind is KernelKind.MATMUL)
        - 2 * TOKENS * 64 * SMALL.count
    )
    assert len(loop) > 6 * SMALL.count > len(grouped)


def units_of(shape: Llama) -> Model:
    return transformer(replace(shape, sequence_length=32), micro_batch_size=1)


def test_parameters_of_experts_are_marked_with_their_number() -> None:
    experts = replace(SMALL, shared_intermediate_size=16, bias=True, router_bias=True)
    model = units_of(shape_of(experts))
    marked = {
        each.name.partition(".")[2]: each.experts for each in model.parameters if each.experts
    }
    names = ("gate_up.weight", "gate_up.bias", "down.weight", "down.bias")
    assert marked == {f"experts.{name}": 8 for name in names}
    with pytest.raises(ModelError, match="experts 4 must be the extent of its first dimension"):
        Parameter(name="weight", shape=(8, 2), experts=4)


def test_first_blocks_are_dense_and_every_second_one_has_experts() -> None:
    shape = replace(shape_of(replace(SMALL, dense_layers=2, every=2)), layers=6)
    routed = [
        any(each.experts for each in unit.parameters)
        for unit in units_of(shape).units
        if unit.name.startswith("block")
    ]
    assert routed == [False, False, False, True, False, True]
    assert [*map(shape.has_experts, range(6))] == routed


def test_active_parameters_are_all_but_those_of_experts_that_a_token_does_not_reach() -> None:
    model = units_of(shape_of(SMALL))
    routed = 3 * SMALL.count * 64 * SMALL.intermediate_size
    assert model.parameter_count - model.active_count == routed * 6 // 8
    dense = transformer(
        Llama(layers=1, hidden_size=8, attention_heads=1, sequence_length=4, vocab_size=8),
        micro_batch_size=1,
    )
    assert dense.active_count == dense.parameter_count


def further(depth: int) -> Model:
    return units_of(replace(shape_of(SMALL), mtp_layers=depth))


def test_a_block_for_a_further_token_shares_embedding_and_head() -> None:
    plain, two = further(0), further(2)
    (unit, other) = (each for each in two.units if each.name.startswith("mtp"))
    block = sum(each.elements for each in plain.units[1].parameters)
    # norms of hidden state and embedding, of the output, and the projection of both
    own = block + 3 * 64 + 2 * 64 * 64
    assert two.parameter_count == plain.parameter_count + 2 * own
    assert {"embedding.token.weight", "head.weight"} <= {each.name for each in unit.parameters}
    assert other.segments[0].inputs[0] == unit.segments[0].outputs[0].name
    *_, last = two.units[-1].segments
    assert last.inputs == ("head/next", "mtp0/loss", "mtp1/loss")
    assert two.loss == Value(name="head/loss", elements=1, dtype=DType.FP32)


LATENT = Latent(key_value_rank=16, query_rank=24, nope_size=16, rope_size=8, value_size=12)


def latent_block(latent: Latent) -> Unit:
    return units_of(replace(shape_of(SMALL), experts=None, latent=latent)).units[1]


def test_latent_attention_saves_compressed_and_expanded_keys() -> None:
    """Norms and layers save their inputs; values are a view of what the last layer expands."""
    heads, tokens, hidden, wide, size = 4, 32, 64, 96, 4
    kept = (
        2 * hidden  # of the two norms, the sum; the output of the first norm
        + 24
        + 24  # compressed queries, before and after their norm
        + (16 + 8)
        + 16  # compressed keys and values, and the normed part
        + 2 * heads * 24  # queries and keys
        + heads * (16 + 12)  # keys without positions, and values
        + heads * 12  # the result
        + heads  # sums of its rows
        + hidden  # the output of the second norm
        + 3 * wide  # gate, up, and their product
        + 4  # statistics of norms
    )
    (segment,) = latent_block(LATENT).segments
    assert segment.saved_bytes == kept * tokens * size


@pytest.mark.parametrize("query_rank", [None, 24])
def test_kernels_of_latent_attention_count_both_sizes_of_heads(query_rank: int | None) -> None:
    (segment,) = latent_block(replace(LATENT, query_rank=query_rank)).segments
    (kernel,) = (each for each in segment.forward if each.kind is KernelKind.ATTENTION)
    assert kernel.flops == 2 * 4 * 32 * 32 * (24 + 12)
    assert kernel.bytes == 32 * 4 * 4 * (24 + 24 + 12 + 12)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more experts than there are": (
        {"experts": {"top_k": 9}},
        "model.experts.top_k: 9 must be at most the 8 experts to choose from",
    ),
    "fewer in the open groups": (
        {"experts": {"groups": 4, "top_groups": 1, "top_k": 3}},
        "model.experts.top_k: 3 must be at most the 2 experts to choose from",
    ),
    "unequal groups": (
        {"experts": {"groups": 3}},
        "model.experts.groups: 3 must divide the 8 experts",
    ),
    "more open groups": (
        {"experts": {"groups": 2, "top_groups": 3}},
        "model.experts.top_groups: 3 must be at most groups 2",
    ),
    "no expert": ({"experts": {"count": 0}}, "model.experts.count: 0 must be at least 1"),
    "a gate of nothing": (
        {"experts": {"shared_gate": True}},
        "model.experts.shared_gate: true needs shared_intermediate_size",
    ),
    "a rate without a bias": (
        {"experts": {"bias_rate": 0.01}},
        "model.experts.bias_rate: 0.01 needs score_bias = true",
    ),
    "a factor without its loss": (
        {"experts": {"auxiliary_loss": False, "auxiliary_coefficient": 0.1}},
        "model.experts.auxiliary_coefficient: 0.1 needs auxiliary_loss = true",
    ),
    "a factor without a z loss": (
        {"experts": {"z_coefficient": 0.1}},
        "model.experts.z_coefficient: 0.1 needs z_loss = true",
    ),
    "a negative factor": (
        {"experts": {"auxiliary_coefficient": -0.1}},
        "model.experts.auxiliary_coefficient: -0.1 must be more than 0",
    ),
    "no weight": ({"experts": {"scaling": 0.0}}, "model.experts.scaling: 0.0 must be more than 0"),
    "attention and experts at once": (
        {"parallel_residual": True},
        "model.parallel_residual: True is not modelled with experts",
    ),
    "odd rotations": (
        {"latent": {"rope_size": 7}},
        "model.latent.rope_size: 7 must be even, rotary positions turn pairs",
    ),
    "shared heads of compressed keys": (
        {"latent": {}, "key_value_heads": 2},
        "model.key_value_heads: 2 is not modelled with latent",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_that_cannot_exist_is_refused_by_its_field(name: str) -> None:
    fields, line = WRONG[name]
    with pytest.raises(ArchitectureError) as caught:
        replace(shape_of(SMALL), **{part: changed(part, value) for part, value in fields.items()})
    assert str(caught.value) == line


def changed(part: str, value: Any) -> Any:  # noqa: ANN401 - a field of any type
    """Return experts or latent attention with other fields, or any other value as it is."""
    whole: dict[str, Experts | Latent] = {"experts": SMALL, "latent": LATENT}
    return replace(whole[part], **value) if isinstance(value, dict) else value


def test_blocks_of_further_tokens_need_sharded_tokens_on_a_tensor_axis() -> None:
    shape = replace(shape_of(SMALL), sequence_length=32, experts=None, mtp_layers=1)
    with pytest.raises(ModelError) as caught:
        transformer(shape, micro_batch_size=1, tensor=2)
    assert str(caught.value) == (
        "model.mtp_layers: not modelled with tensor 2 unless tokens are sharded; say "
        "sequence_parallel"
    )


def test_ranks_of_a_tensor_axis_have_the_sinks_of_their_heads() -> None:
    shape = replace(shape_of(SMALL), sequence_length=32, experts=None, sinks=True)
    whole, part = (transformer(shape, micro_batch_size=1, tensor=each) for each in (1, 2))
    sinks = [each for each in part.parameters if each.name.endswith(".sinks")]
    assert sinks
    assert all(each.tensor_sharded for each in sinks)
    known = {each.name: each.elements for each in whole.parameters}
    assert all(2 * each.elements == known[each.name] for each in sinks)


@pytest.mark.parametrize(
    "changes",
    [{"latent": LATENT}, {"sinks": True}, {"mtp_layers": 1}],
    ids=lambda each: next(iter(each)),
)
def test_parts_that_need_whole_sequences_are_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(ArchitectureError) as caught:
        replace(shape_of(SMALL, execution=Execution(context=2)), **changes)
    assert str(caught.value) == f"model.{name}: not modelled for context of several ranks"


def test_sinks_are_one_trained_number_for_each_head() -> None:
    plain = replace(shape_of(SMALL), experts=None, sequence_length=32)
    with_sinks = transformer(replace(plain, sinks=True), micro_batch_size=1)
    without = transformer(plain, micro_batch_size=1)
    assert with_sinks.parameter_count - without.parameter_count == 4
