"""Linear layers and norms: what every part of a transformer is made of."""

from zsim.architecture import Norm
from zsim.dtype import DType
from zsim.execution import Float8
from zsim.kernel import Kernel, KernelKind, matmul, streaming
from zsim.model import Parameter
from zsim.transformer.operator import Operator, Tensor
from zsim.transformer.size import Size


def linear(
    size: Size,
    source: Tensor,
    target: Tensor,
    weight: Parameter,
    *,
    bias: Parameter | None = None,
    kept: Tensor | None = None,
    narrow: Float8 | None = None,
) -> Operator:
    """`source` times the transpose of `weight` (rows x columns), plus `bias` of so many rows.

    Backward is two products, one for each operand, and reads the source, or what was `kept` of it;
    the bias's gradient is a sum over tokens. With `narrow` products are in 8-bit floats, to which
    operands are cast first. A bias that is not fused is written to the target and added to by the
    product.
    """
    rows, columns = weight.shape
    tokens = size.tokens
    dtype = size.dtype if narrow is None else DType.FP8
    forward: tuple[Kernel, ...] = (matmul(tokens, rows, columns, dtype),)
    backward: tuple[Kernel, ...] = (
        matmul(tokens, columns, rows, dtype, backward=True),
        matmul(rows, columns, tokens, dtype, backward=True),
    )
    if narrow is not None:
        operands = (_cast(tokens, columns), _cast(rows, columns))
        forward = (*operands, *forward)
        gradient = _cast(tokens, rows, backward=True)
        # A row of the one product is a column of the other.
        gradients = (gradient,) * (2 if narrow is Float8.ROWWISE else 1)
        backward = (*gradients, *operands, *backward)
    if bias is not None and not size.shape.fused:
        added = streaming(KernelKind.ELEMENTWISE, (tokens, rows), size.dtype, streams=2)
        forward = (added, *forward)
    if bias is not None:
        backward += (column_sum(size, rows),)
    return Operator(
        reads=(source,),
        makes=target,
        parameters=(weight,) if bias is None else (weight, bias),
        saves=(source if kept is None else kept,),
        forward=forward,
        backward=backward,
    )


def _cast(rows: int, columns: int, *, backward: bool = False) -> Kernel:
    """An operand of two bytes read for its largest element, and again to write one byte of each."""
    return streaming(
        KernelKind.ELEMENTWISE, (rows, columns), DType.FP8, streams=5, backward=backward
    )


def column_sum(size: Size, columns: int, *, tokens: int | None = None) -> Kernel:
    """The gradient of a bias: a sum over tokens, over all of them if nothing is said."""
    shape = (size.tokens if tokens is None else tokens, columns)
    return streaming(KernelKind.ELEMENTWISE, shape, size.dtype, streams=1, backward=True)


def normalize(size: Size, source: Tensor, target: Tensor, name: str) -> Operator:
    """A norm called `name`: it keeps its source and for each token mean and deviation, or RMS.

    Forward reads and writes; backward reads source and gradient, writes the source's gradient, and
    reads both again for those of the parameters.
    """
    shape, dtype = size.shape, size.dtype
    layer = shape.norm is Norm.LAYER
    weight = Parameter(name=f"{name}.weight", shape=(size.hidden,))
    bias = Parameter(name=f"{name}.bias", shape=(size.hidden,))
    statistics = Tensor(
        name=f"{source.name}/{name}/statistics",
        elements=size.own_tokens * (2 if layer else 1),
        dtype=size.wide,
    )
    area = (size.own_tokens, size.hidden)
    return Operator(
        reads=(source,),
        makes=target,
        parameters=(weight, bias) if layer and shape.bias else (weight,),
        saves=(source, statistics),
        forward=(streaming(KernelKind.NORM, area, dtype, streams=2),),
        backward=(streaming(KernelKind.NORM, area, dtype, streams=5, backward=True),),
    )
