"""What the model says is kept for backward is what autograd keeps, unit by unit, to the byte."""

from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from drawn_examples import examples
from drawn_shapes import architectures
from hypothesis import given
from hypothesis import strategies as st
from kept_by_autograd import kept_by_autograd
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from zsim.model.architecture import Architecture, LoRA, Norm, Positions, QKNorm
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import BATCH
from zsim.model.transformer import transformer as described
from zsim.strategy.precision import Precision
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module.tensor_part import TensorPlace
from zsim_torch.module.transformer import transformer
from zsim_torch.module.transformer_segment import SegmentedDecoder


def statistics_on_cpu(
    part: nn.Module, shape: Architecture, precision: Precision, *, own: int, tokens: int, ranks: int
) -> int:
    """Bytes that torch's layer norm saves by on a CPU: its statistics are in the input's format.

    Norms of hidden states have `own` rows, those of queries and keys some for each of `tokens`.
    """
    if shape.norm is Norm.RMS:
        return 0
    by_head = shape.qk_norm is QKNorm.HEAD
    heads = {"ln_q": shape.attention_heads // ranks, "ln_k": shape.shared_heads // ranks}
    rows = sum(
        (tokens * (heads[name] if by_head else 1)) if name in heads else own
        for name, _ in part.named_children()
        if name.startswith("ln")
    )
    return 2 * rows * (precision.wide.size_bytes - precision.compute.size_bytes)


def normed(shape: Architecture, norms: QKNorm | None) -> Architecture:
    """The shape with norms of queries and keys, where these are tensors of their own."""
    return shape if shape.joined_qkv else replace(shape, qk_norm=norms)


@given(
    st.builds(normed, architectures(), st.none() | st.sampled_from([QKNorm.HEAD, QKNorm.WIDTH])),
    st.integers(1, 3),
    st.sampled_from(Precision),
)
@examples(80)
def test_the_model_says_what_autograd_keeps_to_the_byte(
    shape: Architecture, size: int, precision: Precision
) -> None:
    model = described(shape, micro_batch_size=size, precision=precision)
    module = transformer(shape, dtype=TORCH_DTYPE[precision.compute])
    batch = torch.zeros(size, shape.sequence_length + 1, dtype=torch.int64)
    given = [batch]
    for unit in model.units:
        if unit is model.units[-1]:
            given.append(batch)
        part = module.get_submodule(unit.name)
        kept, keeps_input = kept_by_autograd(part, given)
        (segment,) = unit.segments
        expected = segment.saved_bytes - statistics_on_cpu(
            part, shape, precision, own=model.tokens, tokens=model.tokens, ranks=1
        )
        assert (kept, keeps_input) == (expected, segment.saves_input), unit.name
        flow: torch.Tensor = part(*given)
        assert flow.numel() == segment.outputs[-1].elements
        given = [flow.detach().requires_grad_()]


@given(
    st.builds(normed, architectures(), st.sampled_from([None, QKNorm.HEAD])),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(Precision),
    st.booleans(),
    st.booleans(),
)
@examples(40)
def test_segments_keep_on_each_rank_of_the_tensor_axis_what_the_model_says(
    shape: Architecture, count: int, size: int, precision: Precision, sequence: bool, own_head: bool
) -> None:
    shape = replace(
        shape,
        attention_heads=count * shape.attention_heads,
        key_value_heads=count * shape.shared_heads,
        intermediate_size=count * shape.wide,
        positions=Positions.ROTARY if shape.positions is Positions.ALIBI else shape.positions,
        position_embeddings=None,
    )
    size *= count if sequence else 1
    model = described(
        shape,
        micro_batch_size=size,
        tensor=count,
        precision=precision,
        sequence=sequence,
        in_place_loss=own_head or count == 1,
    )
    batch = torch.zeros(size, shape.sequence_length + 1, dtype=torch.int64)
    module = SegmentedDecoder(model, TensorPlace(count - 1, count))
    segments = [segment for unit in model.units for segment in unit.segments]
    for segment, choice in zip(segments, module.units, strict=True):
        part = choice.module.to_empty(device="cpu").to(TORCH_DTYPE[precision.compute])
        given: list[torch.Tensor] = []
        for name in segment.inputs:
            value = model.values[name]
            whole = value.tensor_sharded and segment.sums_gradients
            flat = torch.zeros(
                value.elements * (count if whole else 1), dtype=TORCH_DTYPE[value.dtype]
            )
            given.append(flat.requires_grad_() if name != BATCH else batch)
        for parameter in part.parameters():
            nn.init.zeros_(parameter)
        kept, keeps_input = kept_by_autograd(part, given)
        own = model.values[segment.inputs[0]].elements // shape.hidden_size
        expected = segment.saved_bytes - statistics_on_cpu(
            part, shape, precision, own=own, tokens=model.tokens, ranks=count
        )
        if count == 1 and segment.outputs[0].name == "head/statistics":
            # Kept of one rank, too: a byte of each token, and not torch's count of them.
            expected += model.tokens - precision.wide.size_bytes
        assert (kept, keeps_input) == (expected, segment.saves_input), segment
        (made,) = segment.outputs
        scattered = segment.ends is not None and made.tensor_sharded
        flow: torch.Tensor = part(*given)
        assert flow.numel() == made.elements * (count if scattered else 1)


class Adapted(nn.Module):
    """A linear layer with an adapter, as peft has it."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        assert isinstance(base, nn.Linear)
        self.base = base.requires_grad_(False)
        dtype = base.weight.dtype
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.base(given)
        adapter: torch.Tensor = self.lora_B(self.lora_A(given)) * 2.0
        return made + adapter


def adapt(module: nn.Module, shape: Architecture) -> None:
    """Freeze what the shape says is frozen, and put its adapters in."""
    for name, parameter in module.named_parameters():
        frozen = any(fnmatchcase(name, pattern) for pattern in shape.frozen)
        parameter.requires_grad_(not frozen and shape.lora is None)
    for layer in range(shape.layers if shape.lora is not None else 0):
        assert shape.lora is not None
        block = module.get_submodule(f"block{layer}")
        for target in sorted(shape.adapted):
            setattr(block, target, Adapted(block.get_submodule(target), shape.lora.rank))


def products_of(kernels: tuple[Kernel, ...]) -> int:
    """FLOPs of products with weights: not of queries with keys, nor of scores with values."""
    kinds = (each for each in kernels if each.kind is KernelKind.MATMUL and not each.causal)
    return sum(each.flops for each in kinds)


def products_by_torch(counter: FlopCounterMode) -> int:
    """The same of what torch has run."""
    found = counter.get_flop_counts().get("Global", {})
    return sum(flops for name, flops in found.items() if str(name) in ("aten.mm", "aten.addmm"))


PATTERNS = ("embedding*", "block0.*", "*.bias", "*.weight", "*.ln*", "*.down.*", "head*", "*.qkv*")


@given(
    architectures(),
    st.lists(st.sampled_from(PATTERNS), max_size=2, unique=True),
    st.integers(0, 3),
    st.data(),
)
@examples(80)
def test_with_frozen_parameters_and_adapters_it_keeps_and_computes_what_autograd_does(
    shape: Architecture, patterns: list[str], rank: int, data: st.DataObject
) -> None:
    names = [parameter.name for parameter in described(shape, micro_batch_size=1).parameters]
    fitting = [each for each in patterns if any(fnmatchcase(name, each) for name in names)]
    targets = data.draw(st.sets(st.sampled_from(shape.linear_layers), max_size=3))
    lora = LoRA(rank=rank, targets=tuple(sorted(targets))) if rank else None
    if lora is None and all(any(fnmatchcase(name, each) for each in fitting) for name in names):
        fitting = []
    shape = replace(shape, frozen=() if lora else tuple(fitting), lora=lora)
    model = described(shape, micro_batch_size=2)
    module = transformer(shape)
    adapt(module, shape)
    given = [torch.zeros(2, shape.sequence_length + 1, dtype=torch.int64)]
    batch = given[0]
    for unit in model.units:
        if unit is model.units[-1]:
            given.append(batch)
        part, (segment,) = module.get_submodule(unit.name), unit.segments
        kept, keeps_input = kept_by_autograd(part, given)
        if given[0].requires_grad or not segment.backward or unit.name == "embedding":
            assert (kept, keeps_input) == (segment.saved_bytes, segment.saves_input), unit.name
        else:  # queries without a gradient are kept here where keys have one, and such
            assert (kept, keeps_input) <= (segment.saved_bytes, segment.saves_input), unit.name
        flow: torch.Tensor = part(*given)
        assert flow.requires_grad == segment.outputs[-1].requires_gradient == bool(segment.backward)
        if flow.requires_grad and not shape.recompute_attention:
            with FlopCounterMode(display=False) as counter:
                torch.autograd.backward(flow.sum())
            assert products_by_torch(counter) == products_of(segment.backward), unit.name
        given = [flow.detach().requires_grad_(flow.requires_grad)]
