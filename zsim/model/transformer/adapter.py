"""Adapters of frozen linear layers, and their weights in 4 bits; loaded with the first adapter."""

from collections.abc import Callable
from dataclasses import replace

from zsim.dtype import SCALE_BYTES, WEIGHTS_BLOCK, DType, Quantization
from zsim.model.architecture import HEAD
from zsim.model.generator import Draws
from zsim.model.kernel import Kernel, KernelKind, dropout, streaming
from zsim.model.model import Parameter
from zsim.model.transformer.operator import Operator, Tensor
from zsim.model.transformer.size import Size

Linear = Callable[[Size, Tensor, Tensor, Parameter], Operator]  # `linear.linear`, its importer


def adapter(
    linear: Linear, size: Size, source: Tensor, tensors: tuple[Tensor, Tensor], *, name: str
) -> tuple[Operator, ...]:
    """Return the operators of an adapter, which adds its output to the first of `tensors`."""
    base, target = tensors
    lora = size.shape.lora
    assert lora is not None
    rows, columns = (each.elements // size.tokens for each in (target, source))
    parts = size.shape.adapted_parts if name.endswith(".qkv") else ()
    rank = lora.rank * max(1, len(parts))
    made = sum(size.query_width if each == "q" else size.key_width for each in parts) or rows
    low, delta = size.rows(f"{name}/lora_A", rank), size.rows(f"{name}/lora_B", made)
    down = size.copied(f"{name}.lora_A.weight", rank, columns)
    up = size.copied(f"{name}.lora_B.weight", made, lora.rank)
    drops, given = _dropped(size, source, name, lora.dropout)
    operators = (*drops, linear(size, given, low, down), linear(size, low, delta, up))
    area, kind = (size.tokens, rows), KernelKind.ELEMENTWISE
    if made < rows:
        padded = size.rows(f"{name}/lora_padded", rows)
        operators = (*operators, _padded(size, delta, padded))
        delta = padded
    added = Operator(
        reads=(base, delta),
        makes=target,
        shares_gradient=True,
        forward=(streaming(kind, area, size.dtype, streams=3),),
    )
    if size.shape.execution.compiled:  # scaled in the same kernel
        return (*operators, added)
    scaled = size.rows(f"{name}/lora_scaled", rows)
    scale = Operator(
        reads=(delta,),
        makes=scaled,
        forward=(streaming(kind, area, size.dtype, streams=2),),
        backward=(streaming(kind, area, size.dtype, streams=2, backward=True),),
    )
    return (*operators, scale, replace(added, reads=(base, scaled)))


def _padded(size: Size, source: Tensor, target: Tensor) -> Operator:
    """Return the copy of the output of an adapter into zeros (`zero_pad` of LitGPT)."""
    some, every = ((size.tokens, each.elements // size.tokens) for each in (source, target))
    kind = KernelKind.ELEMENTWISE
    return Operator(
        reads=(source,),
        makes=target,
        forward=(
            streaming(kind, every, size.dtype, streams=1),
            streaming(kind, some, size.dtype, streams=2),
        ),
        backward=(streaming(kind, some, size.dtype, streams=2, backward=True),),
    )


def adapted_head(linear: Linear, size: Size, plain: Operator, *, chunk: int) -> Operator:
    """Return the output projection with a weight of 4 bits and an adapter, if the shape has them.

    The terms of its sum have `chunk` elements each.
    """
    lora, found, (source,) = size.shape.lora, plain, plain.reads
    assert lora is not None
    weight, *rest = plain.parameters
    if lora.quantizes_head:
        weight = replace(weight, quantized=lora.quantization)
        found = replace(found, parameters=(weight, *rest))
        found = dequantizing(size, found, weight)
    if HEAD not in size.shape.adapted:
        return found
    drops, given = _dropped(size, source, HEAD, lora.dropout)
    low = size.rows(f"{HEAD}/lora_A", lora.rank)
    rows, columns = weight.shape
    down = size.copied(f"{HEAD}.lora_A.weight", lora.rank, columns)
    up = size.copied(f"{HEAD}.lora_B.weight", rows, lora.rank)
    parts = (*drops, linear(size, given, low, down), linear(size, low, plain.makes, up))
    area = (size.tokens, rows)
    sums = tuple(streaming(KernelKind.ELEMENTWISE, area, size.dtype, streams=n) for n in (2, 3))
    scaled = streaming(KernelKind.ELEMENTWISE, area, size.dtype, streams=2, backward=True)
    terms = chunk * size.dtype.size_bytes
    return replace(
        found,
        parameters=(*found.parameters, down, up),
        saves=(*found.saves, *(tensor for each in parts for tensor in each.saves)),
        draws=drops[0].draws if drops else None,
        forward_scratch=found.forward_scratch + 3 * terms,
        backward_scratch=found.backward_scratch + terms,
        forward=(*found.forward, *(kernel for each in parts for kernel in each.forward), *sums),
        backward=(scaled, *found.backward, *(one for each in parts for one in each.backward)),
        trains=(*found.trains, *(kernel for each in parts for kernel in each.trains)),
    )


def _dropped(
    size: Size, source: Tensor, name: str, probability: float
) -> tuple[tuple[Operator, ...], Tensor]:
    """Return the dropout of an adapter's input, if any, and the tensor that the adapter reads."""
    if not probability:
        return (), source
    columns = source.elements // size.tokens
    made, area = size.rows(f"{name}/dropped", columns), (size.tokens, columns)
    mask = Tensor(name=f"{name}/mask", elements=source.elements, dtype=DType.INT8)
    found = Operator(
        reads=(source,),
        makes=made,
        saves=(mask,),
        draws=Draws.ALIKE,
        forward=(dropout(area, size.dtype),),
        backward=(dropout(area, size.dtype, backward=True),),
    )
    return (found,), made


def dequantizing(size: Size, plain: Operator, weight: Parameter) -> Operator:
    """Return a linear layer that makes its weight of 4 bits for each product, if it is quantized.

    The whole weight is temporary memory of both directions.
    """
    if weight.quantized is None:
        return plain
    lora = size.shape.lora
    casts = lora is not None and lora.casts_weights
    scratch = (1 + casts) * weight.elements * size.dtype.size_bytes
    return replace(
        plain,
        saves=plain.reads if lora is not None and lora.keeps_inputs else (),
        forward_scratch=scratch,
        backward_scratch=scratch,
        forward=(*_dequantized(size, weight, backward=False), *plain.forward),
        backward=(*_dequantized(size, weight, backward=True), *plain.backward),
    )


def _dequantized(size: Size, weight: Parameter, *, backward: bool) -> tuple[Kernel, ...]:
    """Return the kernels that make a weight in 16 bits of its 4 bits, for one product.

    `MatMul4Bit` of bitsandbytes 0.45 (`autograd/_functions.py`) does so in both directions. With
    double quantization `dequantize_4bit` makes the scales first, and adds their mean.
    """
    assert weight.quantized is not None
    elements, scales = weight.elements, -(-weight.elements // WEIGHTS_BLOCK)
    dtype, lora = size.dtype, size.shape.lora
    read = DType.NF4.bytes_of(elements)
    stored = SCALE_BYTES * scales
    moved = [(elements, read + stored + elements * dtype.size_bytes)]
    if weight.quantized is Quantization.NF4_DOUBLE:
        moved.insert(0, (scales, weight.quantized.scale_bytes(elements) + stored))
        moved.insert(1, (scales, 2 * stored))
    if lora is not None and lora.casts_weights:
        moved.append((elements, 2 * elements * dtype.size_bytes))
    return tuple(
        Kernel(
            kind=KernelKind.ELEMENTWISE, flops=2 * count, bytes=size, dtype=dtype, backward=backward
        )
        for count, size in moved
    )
