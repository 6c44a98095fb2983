"""The `Model` of a transformer, from its shape alone.

FLOPs count matrix products alone, 2 per multiply-add, attention of all pairs of tokens (Narayanan
et al. 2021, section 3.1 and appendix); how many of them causal masking leaves out follows from
`Model.attention_flops`. Saved activations are what autograd saves of the modules in `zsim_torch`,
which have no dropout; Korthikanti et al. 2022, section 4.1, counts the same tensors.
"""

from zsim.architecture import Architecture
from zsim.dtype import DType
from zsim.model import BATCH, Model, ModelError, Unit, Value
from zsim.strategy import Precision
from zsim.transformer.block import block, like
from zsim.transformer.ends import embedding, head
from zsim.transformer.size import Size


def transformer(
    shape: Architecture,
    *,
    micro_batch_size: int,
    tensor: int = 1,
    precision: Precision = Precision.FP32,
    sequence: bool = False,
    keeps_whole: bool = False,
    in_place_loss: bool = False,
) -> Model:
    """The model of `shape` for `micro_batch_size` sequences on `tensor` ranks.

    The vocabulary is padded to a multiple of `tensor`, as Megatron-LM does. What `sequence`,
    `keeps_whole` and `in_place_loss` say stands at `Size`; without a tensor axis nothing is cut.

    Raises:
        ModelError: `tensor` does not divide the heads, the width of the MLP, or with `sequence` the
            tokens.
    """
    _need_dividing(shape, micro_batch_size=micro_batch_size, tensor=tensor, sequence=sequence)
    size = Size(
        shape=shape,
        sequences=micro_batch_size,
        tensor=tensor,
        dtype=precision.compute,
        wide=precision.optimizer,
        sequence=sequence and tensor > 1,
        keeps_whole=keeps_whole,
        in_place_loss=in_place_loss,
    )
    batch = Value(
        name=BATCH,
        elements=micro_batch_size * (shape.sequence_length + 1),
        dtype=DType.INT64,
        requires_gradient=False,
    )
    units = _units(size, batch)
    kernels = [kernel for unit in units for part in unit.segments for kernel in part.forward]
    products = sum(kernel.flops for kernel in kernels if kernel.kind.multiplies_matrices)
    return Model(
        name=f"{type(shape).__name__.lower()}-{shape.layers}x{shape.hidden_size}",
        units=tuple(units),
        batch=batch,
        micro_batch_size=micro_batch_size,
        tokens=size.tokens,
        tensor=tensor,
        forward_flops=products * tensor,
        backward_flops=2 * products * tensor,
        attention_flops=3 * tensor * sum(kernel.flops for kernel in kernels if kernel.causal),
        architecture=shape,
    )


def _units(size: Size, batch: Value) -> list[Unit]:
    """The embedding, the blocks and the head, each of which reads what the one before makes."""
    units = [embedding(size, batch)]
    for layer in range(size.shape.layers):
        name, source = f"block{layer}", units[-1].segments[-1].outputs[-1]
        if not layer:
            units.append(block(size, name, source))
            continue
        module = size.shape.module_of(layer)
        calls = units[1 + module] if module != layer else None
        units.append(like(units[1], name, source, calls=calls))
    return [*units, head(size, units[-1].segments[-1].outputs[-1])]


def _need_dividing(
    shape: Architecture, *, micro_batch_size: int, tensor: int, sequence: bool
) -> None:
    """Return if `tensor` ranks divide what they share, and there is a sequence."""
    for name, extent in (
        ("attention_heads", shape.attention_heads),
        ("key_value_heads", shape.shared_heads),
        ("intermediate_size", shape.wide),
    ):
        if extent % tensor:
            raise ModelError(f"tensor: {tensor} must divide {name} {extent}")
    if micro_batch_size < 1:
        raise ModelError(f"micro_batch_size: {micro_batch_size} must be at least 1")
    tokens = micro_batch_size * shape.sequence_length
    if sequence and tokens % tensor:
        raise ModelError(f"sequence: {tensor} must divide the {tokens} tokens of a micro-batch")
