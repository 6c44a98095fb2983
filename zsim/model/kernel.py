"""Kernels of a segment: their kind, cost and shape."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import ceil, gcd, prod

from zsim.dtype import BlockFormat, DType, Multiplied
from zsim.model.token_loads import TokenLoads

CUDNN = 3
"""Version number of cuDNN's attention kernels."""


class KernelError(ValueError):
    """A kernel that cannot exist."""


class KernelKind(StrEnum):
    """Kinds of kernels, and the meaning of their shapes.

    All but the first three are limited by memory; `ELEMENTWISE` represents any of them. Their
    shape gives the extents that they process, such as elements, or rows and columns.
    """

    MATMUL = "matmul"
    """(batch, m, n, k): batch products of m x k with k x n."""
    ATTENTION = "attention"
    """(sequences, heads, key-value heads, queries, keys, head size), without scores in memory."""
    GROUPED_MATMUL = "grouped_matmul"
    """(experts, rows of all experts, n, k): products of each expert's rows with its own matrix."""
    ELEMENTWISE = "elementwise"
    NORM = "norm"
    ACTIVATION = "activation"
    SOFTMAX = "softmax"
    ROTARY = "rotary"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"

    @property
    def multiplies_matrices(self) -> bool:
        """Return True if it uses the matrix units, so that its FLOPs are model FLOPs."""
        return self in PRODUCTS


PRODUCTS = (KernelKind.MATMUL, KernelKind.ATTENTION, KernelKind.GROUPED_MATMUL)
"""Kinds of kernels that use the matrix units."""


class OperandLayout(StrEnum):
    """Memory layouts of the operands of a product, in BLAS letters: transposed (T) or not (N).

    The result is row-major.
    """

    NT = "nt"
    """Both contiguous along the inner extent, as tokens and weights of a linear layer."""
    NN = "nn"
    """The first contiguous along the inner extent, the other along columns, as in dgrad."""
    TN = "tn"
    """The first contiguous along result rows, the other along columns, as in wgrad."""


class FusedPart(StrEnum):
    """Parts of kernels in an operator that fuses a product with a collective of tokens.

    Such an operator multiplies the tokens of one rank at a time while it copies those of the next.
    A product can also overlap a whole collective of other tokens.
    """

    GATHERED = "gathered"
    """Multiplies tokens that one rank contributed to an all-gather."""
    GRADIENT = "gradient"
    """Multiplies gradients that one rank contributed to an all-gather."""
    SCATTERED = "scattered"
    """Computes the contribution to one rank's result of a reduce-scatter."""
    SUM = "sum"
    """Sums the contributions, once all have arrived."""
    SPLIT = "split"
    """Computes a part of the output, which a kernel scatters while the next part is computed."""
    BESIDE_GATHER = "beside_gather"
    """Runs while the tokens are gathered that a later kernel reads."""
    BESIDE_SCATTER = "beside_scatter"
    """Runs while the output of earlier kernels is scattered, or summed over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a segment: its computation and its traffic with device memory.

    Attributes:
        flops: 2 for each multiply-add. Attention counts all pairs of tokens even if causal, and
            omits the scores that flash attention recomputes in its backward, as published rates do.
        shape: extents in the order given by `kind`; empty if not known.
        causal: half of its scores are masked. Attention that never writes them skips that half; a
            matrix product computes it.
        window: maximum number of keys per query, if attention skips all others; 0 if it does
            not. FLOPs then count all pairs inside the window.
        backward: it computes gradients.
        version: of attention kernels: 1 or 2 of FlashAttention, or `CUDNN`.
        recorded_ps: picoseconds that it took in a recorded run, used for every GPU; 0 leaves its
            time to the GPU model.
        part: its part in an operator that is fused with a collective; None if it is in none.
        spared: multiprocessors that it leaves to the kernel of that collective.
        streams: number of streams over which consecutive kernels of this sort are issued: where
            one leaves multiprocessors idle at its end, the next has started.
        layout: of the operands of a product; None if not known.
        loads: rows of each expert in a grouped product. In one of layout TN, which sums over rows,
            they are its inner extents.
        block_scaled: a grouped product whose operands have a scale for 128 elements, so that sums
            of 128 products are scaled one by one.
    """

    kind: KernelKind
    flops: int
    bytes: int
    dtype: Multiplied
    shape: tuple[int, ...] = ()
    causal: bool = False
    backward: bool = False
    version: int = 1
    window: int = 0
    recorded_ps: int = 0
    part: FusedPart | None = None
    spared: int = 0
    streams: int = 1
    layout: OperandLayout | None = None
    loads: TokenLoads | None = None
    block_scaled: bool = False

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise KernelError(f"kernel: flops {self.flops} and bytes {self.bytes} must be >= 0")
        if self.recorded_ps < 0:
            raise KernelError(f"kernel: recorded_ps {self.recorded_ps} must be >= 0")

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Contiguous bytes of a product's operands, along the inner extent and along the others.

        The second value is the greatest common divisor if rows and columns of the result are both
        contiguous. 0 if no operand is contiguous in that direction, or the layout is not known.
        """
        if self.layout is None or isinstance(self.dtype, BlockFormat):
            return 0, 0
        _, m, n, k = self.shape
        size = self.dtype.size_bytes
        if self.layout is OperandLayout.TN:
            extents = (n, k) if self.kind is KernelKind.GROUPED_MATMUL else (m, n)
            return 0, gcd(*extents) * size
        return k * size, n * size

    @property
    def causal_flops(self) -> int:
        """FLOPs of the pairs of tokens that are not masked, accurate to half a row of scores.

        A window is cut short at the start of the sequence: the first `window` queries see only
        half of it on average.
        """
        if not self.causal:
            return self.flops
        if not self.window:
            return self.flops // 2
        return self.flops - self.flops * self.window // (2 * self.keys)

    @property
    def keys(self) -> int:
        """Number of keys that attention reads."""
        return self.shape[4]

    @property
    def seen_keys(self) -> float:
        """Mean number of keys that a query sees."""
        reach = self.window or self.keys
        return reach * (1 - reach / (2 * self.keys)) if self.causal else reach

    @property
    def executed_flops(self) -> int:
        """FLOPs that the kernel executes.

        Attention skips the masked half. Its backward recomputes the scores: five products instead
        of four (Dao et al. 2022, "FlashAttention", algorithm 4).
        """
        if self.kind is not KernelKind.ATTENTION:
            return self.flops
        return self.causal_flops * 5 // 4 if self.backward else self.causal_flops


def parts_of(kernels: Iterable[Kernel]) -> frozenset[FusedPart]:
    """Return the parts of `kernels` in operators that are fused with collectives."""
    return frozenset(each.part for each in kernels if each.part is not None)


def matmul(
    m: int,
    n: int,
    k: int,
    dtype: Multiplied,
    *,
    batch: int = 1,
    causal: bool = False,
    backward: bool = False,
    layout: OperandLayout | None = None,
) -> Kernel:
    """Return `batch` products of m x k with k x n; operands are read and results written once.

    Results of products in narrow formats have two bytes an element.
    """
    return Kernel(
        kind=KernelKind.MATMUL,
        flops=2 * batch * m * n * k,
        bytes=batch * _product_bytes(m, n, k, dtype),
        dtype=dtype,
        shape=(batch, m, n, k),
        causal=causal,
        backward=backward,
        layout=layout,
    )


BLOCK_BITS = {
    BlockFormat.MXFP8: Fraction(8 * 32 + 8, 32),
    BlockFormat.NVFP4: Fraction(4 * 16 + 8, 16),
}
"""Bits of an element, with its part of the scale of its block."""


def _product_bytes(m: int, n: int, k: int, dtype: Multiplied) -> int:
    """Return the bytes of the operands and of the result of m x k with k x n."""
    return _moved_bytes(m * k + k * n, m * n, dtype)


def _moved_bytes(read: int, written: int, dtype: Multiplied) -> int:
    """Return the bytes of elements read in the format of operands, and of the results written."""
    if isinstance(dtype, BlockFormat):
        return ceil(read * BLOCK_BITS[dtype] / 8) + written * DType.BF16.size_bytes
    result = DType.BF16 if dtype is DType.FP8 else dtype
    return read * dtype.size_bytes + written * result.size_bytes


def grouped_matmul(
    loads: TokenLoads,
    n: int,
    k: int,
    dtype: Multiplied,
    *,
    backward: bool = False,
    layout: OperandLayout = OperandLayout.NT,
) -> Kernel:
    """Return the products of each expert's rows with its own n x k matrix, as one kernel.

    With layout TN, these are the products of rows of n and of k elements that give the gradients
    of the matrices: all of them are written, but only rows are read.
    """
    rows = loads.total
    sums_rows = layout is OperandLayout.TN
    operands = (rows * n, rows * k) if sums_rows else (rows * k, loads.busy * n * k)
    result = loads.experts * n * k if sums_rows else rows * n
    return Kernel(
        kind=KernelKind.GROUPED_MATMUL,
        flops=2 * rows * n * k,
        bytes=_moved_bytes(sum(operands), result, dtype),
        dtype=dtype,
        shape=(loads.experts, rows, n, k),
        backward=backward,
        layout=layout,
        loads=loads,
    )


def bound(kernel: Kernel, loads: TokenLoads) -> Kernel:
    """Return `kernel` with other `loads`, if the rows of `kernel` are the counts of their name.

    Kernels that move rows are resized in proportion.
    """
    if kernel.loads is None or kernel.loads.name != loads.name:
        return kernel
    if kernel.kind is KernelKind.GROUPED_MATMUL:
        _, _, n, k = kernel.shape
        layout = kernel.layout or OperandLayout.NT
        made = grouped_matmul(loads, n, k, kernel.dtype, backward=kernel.backward, layout=layout)
        return replace(
            made,
            spared=kernel.spared,
            streams=kernel.streams,
            block_scaled=kernel.block_scaled,
        )
    rows, *rest = kernel.shape
    new = loads.total
    return replace(
        kernel,
        flops=kernel.flops * new // rows,
        bytes=kernel.bytes * new // rows,
        shape=(new, *rest),
        loads=loads,
    )


def resized(product: Kernel, m: int, n: int, k: int) -> Kernel:
    """Return a product like `product`, with other extents."""
    return matmul(m, n, k, product.dtype, backward=product.backward, layout=product.layout)


def streaming(
    kind: KernelKind,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    streams: int,
    backward: bool = False,
) -> Kernel:
    """Return a kernel that reads or writes `streams` tensors of `shape`, element by element."""
    elements = 1
    for extent in shape:
        elements *= extent
    return Kernel(
        kind=kind,
        flops=elements * streams,
        bytes=elements * streams * dtype.size_bytes,
        dtype=dtype,
        shape=shape,
        backward=backward,
    )


def dropout(shape: tuple[int, ...], dtype: DType, *, backward: bool = False) -> Kernel:
    """Return a dropout kernel: it moves the elements, and a byte of mask for each."""
    elements = prod(shape)
    return Kernel(
        kind=KernelKind.ELEMENTWISE,
        flops=elements,
        bytes=elements * (2 * dtype.size_bytes + 1),
        dtype=dtype,
        shape=shape,
        backward=backward,
    )


def flash_attention(
    shape: tuple[int, int, int, int, int, int],
    dtype: DType,
    *,
    causal: bool = True,
    backward: bool = False,
    version: int = 1,
    window: int = 0,
) -> Kernel:
    """Return attention whose scores stay on the chip; `shape` is as for `KernelKind.ATTENTION`.

    It moves queries, keys, values and the result; backward also moves their gradients. With a
    `window`, blocks of scores outside it are skipped (flash-attention 2.3, `window_size`).
    """
    sequences, heads, shared, queries, keys, size = shape
    outer = sequences * size * (2 * heads * queries + 2 * shared * keys)
    return Kernel(
        kind=KernelKind.ATTENTION,
        flops=(4 if backward else 2) * 2 * sequences * heads * queries * (window or keys) * size,
        bytes=outer * (2 if backward else 1) * dtype.size_bytes,
        dtype=dtype,
        shape=shape,
        causal=causal,
        backward=backward,
        version=version,
        window=window,
    )
