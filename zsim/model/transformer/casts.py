"""Casts of the operands of a linear layer for narrow GEMMs, and the input that it saves."""

from collections.abc import Container

from zsim.dtype import DType
from zsim.model.architecture import NormPlacement
from zsim.model.kernel import Kernel, KernelKind, streaming
from zsim.model.model import Parameter
from zsim.model.narrow_products import Kernels, NarrowProducts
from zsim.model.transformer.operator import Tensor
from zsim.model.transformer.size import Size
from zsim.strategy.execution import Float8

SOURCE, SAVED, GRADIENT = "source", "saved", "gradient"
"""Operands that may already be cast: the input of a layer, the saved input, the gradient of the
output."""


LAST = ("proj", "down")
"""Names of the last layers of attention and of an MLP."""


class Casts:
    """Kernels that cast the operands of a linear layer's three GEMMs.

    Operands in `came` already are cast. With `keeps_source`, a last layer saves its input in the
    compute dtype, and Transformer Engine casts it again for the weight gradient.

    Attributes:
        forward, backward: kernels before the GEMMs of the output and of the source gradient.
        trains: kernels before the GEMM of the weight gradient.
    """

    def __init__(
        self,
        size: Size,
        narrow: NarrowProducts,
        weight: Parameter,
        *,
        came: Container[str],
        keeps_source: bool,
    ) -> None:
        self._size = size
        self._narrow = narrow
        self._weight = weight
        self._came = came
        self._rows, self._columns = weight.shape
        self._keeps_source = keeps_source and is_last(weight.name)
        if narrow.joins_casts:
            self.forward, self.backward, self.trains = self._joined()
        elif narrow.recipe in (Float8.TENSORWISE, Float8.ROWWISE):
            self.forward, self.backward, self.trains = self._dynamic()
        else:
            self.forward, self.backward, self.trains = self._separate()

    def _joined(self) -> tuple[Kernels, Kernels, Kernels]:
        """Return casts of Transformer Engine: once for all GEMMs that read an operand.

        The weight is cast outside, once a step. Tokens that a rank gathers for this layer are cast
        by the ranks that have them. Tokens that arrive in 8 bits are copied along the other axis.
        """
        narrow, size, rows, columns = self._narrow, self._size, self._rows, self._columns
        own = size.own_tokens  # all tokens, unless tensor ranks hold different ones
        copies = 1 if self._weight.frozen else narrow.copies
        trains: Kernels = ()
        if not is_last(self._weight.name):
            forward = () if SOURCE in self._came else self._source(own)
            if SAVED in self._came and copies > 1:
                trains = narrow.transposed(size.tokens, columns, backward=True)
            return forward, narrow.cast(size.tokens, rows, copies=copies, backward=True), trains
        forward = self._source(size.tokens)
        if self._keeps_source and not self._weight.frozen:
            trains = narrow.cast(size.tokens, columns, backward=True)
        if GRADIENT not in self._came:
            return forward, narrow.cast(own, rows, copies=copies, backward=True), trains
        if copies > 1:
            trains += narrow.transposed(size.tokens, rows, backward=True)
        return forward, (), trains

    def _source(self, tokens: int) -> Kernels:
        """Return the casts of the input; a norm before it measures it, or casts it itself."""
        narrow, shape = self._narrow, (tokens, self._columns)
        copies = 1 if self._keeps_source or self._weight.frozen else narrow.copies
        if not is_normed(self._size, self._weight.name):
            return narrow.cast(*shape, copies=copies)
        if casts_in_norm(self._size):
            return narrow.transposed(*shape) if copies > 1 else ()
        return narrow.cast(*shape, copies=copies, is_measured=narrow.recipe is Float8.TENSORWISE)

    def _separate(self) -> tuple[Kernels, Kernels, Kernels]:
        """Return casts of torchao's scaled blocks: each operand before each GEMM."""
        narrow, tokens, rows, columns = self._narrow, self._size.tokens, self._rows, self._columns
        gradient = narrow.cast(tokens, rows, backward=True)
        forward = (*narrow.cast(tokens, columns), *narrow.cast(rows, columns, weight=True))
        backward = (*gradient, *narrow.cast(rows, columns, weight=True, backward=True))
        return forward, backward, (*gradient, *narrow.cast(tokens, columns, backward=True))

    def _dynamic(self) -> tuple[Kernels, Kernels, Kernels]:
        """Return casts of torchao's scales of operands or rows, one kernel each."""
        weight, came, tokens = self._weight, self._came, self._size.tokens
        of_source, of_weight = (tokens, self._columns), (self._rows, self._columns)
        gradient = _cast(tokens, self._rows, backward=True)
        casts = () if SOURCE in came else (_cast(*of_source),)
        forward = (*casts, *(() if weight.float8 else (_cast(*of_weight),)))
        # preprocess_addmm (torchao 0.19, torchao/float8/float8_ops.py): by rows times by columns
        turned = _turned(*of_weight) if weight.float8 else _cast(*of_weight)
        backward = (*(() if GRADIENT in came else (gradient,)), turned)
        # A row of one product is a column of the other.
        again = (gradient,) if self._narrow.recipe is Float8.ROWWISE else ()
        if GRADIENT in came:
            again = (_turned(tokens, self._rows),)
        saved = _turned(*of_source) if SAVED in came else _cast(*of_source)
        return forward, backward, (*again, saved)


def casts_in_norm(size: Size) -> bool:
    """Return True if the norm before a linear layer writes its input in 8 bits.

    `rmsnorm_fwd` and `layernorm_fwd` of Transformer Engine do so with delayed scaling; their
    result is transposed by another kernel. With `tensorwise` they only measure it.
    """
    narrow = size.narrow
    return narrow is not None and narrow.joins_casts and narrow.recipe is Float8.DELAYED


def is_last(weight: str) -> bool:
    """Return True if the layer of a weight is the last of attention or of an MLP."""
    return weight.split(".")[-2] in LAST


def is_normed(size: Size, weight: str) -> bool:
    """Return True if the layer of a weight reads the output of a norm directly."""
    return not is_last(weight) and size.shape.norm_placement is not NormPlacement.AFTER


def kept_cast(narrow: NarrowProducts, size: Size, source: Tensor) -> Tensor:
    """Return the cast input that a layer of Transformer Engine saves for its weight gradient."""
    columns = source.elements // size.tokens
    kept = narrow.stored_bytes(size.tokens, columns)
    return Tensor(name=f"{source.name}/cast", elements=kept, dtype=DType.INT8)


def _cast(rows: int, columns: int, *, backward: bool = False) -> Kernel:
    """Return the cast of a two-byte operand: it is read for its maximum and to write bytes."""
    return streaming(
        KernelKind.ELEMENTWISE, (rows, columns), DType.FP8, streams=5, backward=backward
    )


def _turned(rows: int, columns: int) -> Kernel:
    """Return the transposing copy of an operand in 8-bit floats."""
    kind = KernelKind.ELEMENTWISE
    return streaming(kind, (rows, columns), DType.FP8, streams=2, backward=True)
