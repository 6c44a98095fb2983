"""Linear layers and norms, used by every part of a transformer."""

from collections.abc import Container, Iterable
from dataclasses import replace

from zsim.dtype import DType
from zsim.model.architecture import Norm
from zsim.model.kernel import (
    FusedPart,
    Kernel,
    KernelKind,
    OperandLayout,
    matmul,
    resized,
    streaming,
)
from zsim.model.model import Parameter
from zsim.model.narrow_products import NarrowProducts
from zsim.model.transformer.casts import GRADIENT, SAVED, SOURCE, Casts, kept_cast
from zsim.model.transformer.operator import Operator, Tensor
from zsim.model.transformer.size import Size
from zsim.strategy.execution import Float8, TokenFusion

OUTPUT = "proj"
"""Name of the last layer of attention."""

_CAST_BEFORE = {False: frozenset({SOURCE, SAVED}), True: frozenset({SAVED, GRADIENT})}
"""Operands that are cast before they are gathered over the tensor axis, or are saved so, by
whether a layer scatters its output."""

_PARTS = {False: (FusedPart.GATHERED, None), True: (FusedPart.SCATTERED, FusedPart.GRADIENT)}
"""Parts of a layer's products that are fused with collectives of tokens, in forward and in the
input gradient, by whether it scatters its output.

The input gradient of layers that gather their input is one of several terms of a sum, so no single
product computes the scattered tensor (`_find_producer_matmul`, torch 2.13).
"""


def layer(
    size: Size,
    source: Tensor,
    target: Tensor,
    name: str,
    *,
    biased: bool = False,
    kept: Tensor | None = None,
    scatters: bool = False,
    shares: bool = False,
) -> tuple[Operator, ...]:
    """Return the linear layer `name` of a block, with its adapter if any (Hu et al. 2021).

    A layer that does not `scatter` its output over the tensor axis reads gathered input. One that
    `shares` its input is part of the same layer in Transformer Engine as an earlier one. The
    adapter is as in peft (`lora.Linear.forward`): A and B are linear layers, whose output is
    scaled and added.
    """
    rows, columns = (each.elements // size.tokens for each in (target, source))
    weight = size.part(f"{name}.weight", rows, columns)
    narrow, part = size.narrow, name.rpartition(".")[2]
    casts_weights = size.shape.execution.float8_gathers or (narrow and narrow.joins_casts)
    lora = size.shape.lora
    quantized = None if lora is None else lora.quantization
    weight = replace(weight, float8=bool(narrow and casts_weights), quantized=quantized)
    bias = size.part(f"{name}.bias", rows) if biased else None
    adapted = part in size.shape.adapted
    base = size.rows(f"{target.name}/base", rows) if adapted else target
    if size.float8_tokens and scatters:  # saved in 8 bits (Float8RowwiseParallel)
        kept = Tensor(name=f"{source.name}/narrow", elements=source.elements, dtype=DType.FP8)
    came = _CAST_BEFORE[scatters] if size.float8_tokens else frozenset[str]()
    if narrow and narrow.joins_casts:
        if shares:  # the first layer casts the input of all
            came = (came | {SOURCE}) - {SAVED}
        if part == OUTPUT and narrow.recipe is not Float8.DELAYED:
            kept = source
        elif scatters or not size.sequence:
            kept = kept_cast(narrow, size, source)
    frozen = linear(size, source, base, weight, bias=bias, kept=kept, narrow=narrow, came=came)
    if size.fused_by is TokenFusion.COMPILER:
        frozen = replace(
            frozen,
            forward=_in_parts(size, frozen.forward, _PARTS[scatters][0]),
            backward=_in_parts(size, frozen.backward, _PARTS[scatters][1]),
        )
    if lora is not None:
        from zsim.model.transformer import adapter  # noqa: PLC0415 (only with adapters)

        frozen = adapter.dequantizing(size, frozen, weight)
        if adapted:
            return (frozen, *adapter.adapter(linear, size, source, (base, target), name=name))
    return (frozen,)


def linear(
    size: Size,
    source: Tensor,
    target: Tensor,
    weight: Parameter,
    *,
    bias: Parameter | None = None,
    kept: Tensor | None = None,
    narrow: NarrowProducts | None = None,
    came: Container[str] = (),
) -> Operator:
    """Return `source` times the transpose of `weight` (rows x columns), plus `bias` (rows).

    Backward is two products, one per operand, and reads the source or its saved form `kept`; the
    gradient of the bias is a sum over tokens. A frozen weight has no product and saves no source.
    With `narrow`, `Casts` adds kernels that cast the operands of products. Operands in `came`
    (`SOURCE`, `SAVED`, `GRADIENT`) are already cast. A bias that is not fused is written to the
    target, to which the product is added.
    """
    rows, columns = weight.shape
    tokens = size.tokens
    dtype = size.dtype if narrow is None else narrow.dtype
    # No rates of narrow products with odd rows were published; torch.compile pads other formats
    # (`shape_padding` of torch/_inductor/config.py, on in PyTorch 2.13).
    rounds = narrow is not None or size.shape.execution.compiled
    nt, nn, tn = (None, None, None) if rounds else tuple(OperandLayout)
    forward: tuple[Kernel, ...] = (matmul(tokens, rows, columns, dtype, layout=nt),)
    backward: tuple[Kernel, ...] = (matmul(tokens, columns, rows, dtype, backward=True, layout=nn),)
    trains: tuple[Kernel, ...] = (matmul(rows, columns, tokens, dtype, backward=True, layout=tn),)
    if narrow is not None:
        casts = Casts(size, narrow, weight, came=came, keeps_source=kept == source)
        forward = (*casts.forward, *forward)
        backward = (*casts.backward, *backward)
        trains = (*casts.trains, *trains)
    if bias is not None and not size.shape.fused:
        added = streaming(KernelKind.ELEMENTWISE, (tokens, rows), size.dtype, streams=2)
        forward = (added, *forward)
    return Operator(
        reads=(source,),
        makes=target,
        parameters=(weight,) if bias is None else (weight, bias),
        saves=() if weight.frozen else (source if kept is None else kept,),
        forward=forward,
        backward=backward,
        trains=(
            *(() if weight.frozen else trains),
            *(() if bias is None or bias.frozen else (column_sum(size, rows),)),
        ),
    )


def _in_parts(
    size: Size, kernels: tuple[Kernel, ...], part: FusedPart | None
) -> tuple[Kernel, ...]:
    """Return `kernels` with the final product split by rank of its tokens, as `part`."""
    if part is None or (part is not FusedPart.SCATTERED and not size.fuses_gathers):
        return kernels
    *before, product = kernels
    _, _, rows, columns = product.shape
    own = resized(product, size.own_tokens, rows, columns)
    return (*before, *(replace(own, part=part),) * size.tensor)


def column_sum(size: Size, columns: int, *, tokens: int | None = None) -> Kernel:
    """Return the gradient of a bias: a sum over `tokens`, by default all of them."""
    shape = (size.tokens if tokens is None else tokens, columns)
    return streaming(KernelKind.ELEMENTWISE, shape, size.dtype, streams=1, backward=True)


def normalize(
    size: Size,
    source: Tensor,
    target: Tensor,
    name: str,
    *,
    width: int | None = None,
    of_own_heads: bool = False,
    scaled: bool = True,
) -> Operator:
    """Return the norm `name`: it saves its source, and mean and deviation of rows, or RMS.

    If composed of PyTorch operators, it saves source and normalized source, both in fp32.

    A row is the hidden state of a token, or `width` elements. With `of_own_heads`, rows are of the
    heads of this rank of the tensor axis. A norm that is not `scaled` has no parameters. Forward
    reads and writes. Backward reads source and gradient, writes the source's gradient, and reads
    both again for gradients of trained parameters; in a split backward, these are separate kernels.
    """
    shape, dtype, width = size.shape, size.dtype, width or size.hidden
    rows, centred = source.elements // width, shape.norm is Norm.LAYER
    copied = size.copied_for_heads if of_own_heads else size.copied
    parameters = [copied(f"{name}.weight", width)] if shape.norm_weight and scaled else []
    if centred and shape.biased_norms and scaled:
        parameters.append(copied(f"{name}.bias", width))
    frozen = all(each.frozen for each in parameters)
    statistics = Tensor(
        name=f"{source.name}/{name}/statistics",
        elements=rows * (2 if centred else 1),
        dtype=size.wide,
    )
    area = (rows, width)
    if size.composes_norms:
        return _composed(size, (source, target), statistics, parameters)
    both, alone, rest = (
        streaming(KernelKind.NORM, area, dtype, streams=streams, backward=True)
        for streams in (5, 3, 2)
    )
    return Operator(
        reads=(source,),
        makes=target,
        parameters=tuple(parameters),
        saves=(source, statistics),
        forward=(streaming(KernelKind.NORM, area, dtype, streams=2),),
        backward=(alone if frozen else both,),
        apart=() if frozen else ((alone,), (rest,)),
    )


# Elements of the narrow and the wide format that each kernel of a composed norm reads and writes,
# as torch 2.13 dispatches rms_norm and its backward without fused kernels.
CAST = (1, 1)
SQUARES, MEAN, PRODUCT = (0, 2), (0, 1), (0, 2)
OF_TWO, QUOTIENT = (0, 3), (0, 1)
FORWARD = (CAST, SQUARES, MEAN, PRODUCT, PRODUCT, CAST)
BACKWARD = (
    *(CAST, PRODUCT),  # of the result, times the weight
    *(OF_TWO, PRODUCT, MEAN),  # of the root: its product, its sum; and of the source with it
    *(QUOTIENT, SQUARES, PRODUCT, OF_TWO),  # of the mean and of the squares
    *(OF_TWO, CAST),  # both, in the format of the source
)
OF_WEIGHT = (OF_TWO, MEAN)


def _composed(
    size: Size,
    tensors: tuple[Tensor, Tensor],
    statistics: Tensor,
    parameters: list[Parameter],
) -> Operator:
    """Return a norm by the root mean square, with one kernel per operator."""
    source, target = tensors
    shape = (statistics.elements, source.elements // statistics.elements)

    def kernels(moved: Iterable[tuple[int, int]], *, backward: bool) -> tuple[Kernel, ...]:
        return tuple(
            Kernel(
                kind=KernelKind.ELEMENTWISE,
                flops=source.elements,
                bytes=source.elements
                * (narrow * size.dtype.size_bytes + wide * size.wide.size_bytes),
                dtype=size.wide,
                shape=shape,
                backward=backward,
            )
            for narrow, wide in moved
            if not narrow or size.dtype is not size.wide
        )

    trained = [each for each in parameters if not each.frozen]
    back = kernels(BACKWARD, backward=True)
    weights = kernels(OF_WEIGHT, backward=True) if trained else ()
    wide, normal = (
        Tensor(name=f"{target.name}/{name}", elements=source.elements, dtype=size.wide)
        for name in ("wide", "normal")
    )
    return Operator(
        reads=(source,),
        makes=target,
        parameters=tuple(parameters),
        saves=(wide, *((normal,) if trained else ()), statistics),
        forward=kernels(FORWARD, backward=False),
        backward=back,
        trains=weights,
    )
