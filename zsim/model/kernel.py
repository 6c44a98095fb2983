"""Kernels of a segment: what each does, and its shape."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import gcd, prod

from zsim.dtype import DType

CUDNN = 3
"""Version of attention's kernels that is cuDNN's."""


class KernelError(ValueError):
    """A kernel that cannot exist."""


class KernelKind(StrEnum):
    """Kinds of kernels, and the words in which their shapes are given.

    All but the first two move memory, and `ELEMENTWISE` is any of those: their shape is what they
    do one thing to, such as elements, or rows and columns.
    """

    MATMUL = "matmul"
    """(batch, m, n, k): batch products of m x k with k x n."""
    ATTENTION = "attention"
    """(sequences, heads, key-value heads, queries, keys, head size), scores never in memory."""
    ELEMENTWISE = "elementwise"
    NORM = "norm"
    ACTIVATION = "activation"
    SOFTMAX = "softmax"
    ROTARY = "rotary"
    EMBEDDING = "embedding"
    CROSS_ENTROPY = "cross_entropy"

    @property
    def multiplies_matrices(self) -> bool:
        """Return whether it runs on the matrix units, so that its FLOPs count as the model's."""
        return self in (KernelKind.MATMUL, KernelKind.ATTENTION)


class OperandLayout(StrEnum):
    """Orders in which the operands of a product lie, in letters of BLAS: turned (T) or not (N).

    The result lies by rows: it is contiguous along its columns.
    """

    NT = "nt"
    """Both along the inner extent, as tokens and weights of a linear layer."""
    NN = "nn"
    """The first along the inner extent, the other along columns, as for gradients of tokens."""
    TN = "tn"
    """The first along rows of the result, the other along columns, as for gradients of weights."""


class FusedPart(StrEnum):
    """Parts that kernels have in an operator which fuses a product with a collective of tokens.

    It multiplies the tokens of one rank after the other, while those of the next are copied. A
    product may run beside a whole collective, too, whose tokens are another's.
    """

    GATHERED = "gathered"
    """It multiplies tokens that one rank brought to an all-gather."""
    GRADIENT = "gradient"
    """The same of a gradient that is gathered."""
    SCATTERED = "scattered"
    """It makes the summand of what one rank gets of a reduce-scatter."""
    SUM = "sum"
    """It adds up the summands, once all have come."""
    SPLIT = "split"
    """It makes a part of the output, which a kernel scatters while it makes the next."""
    BESIDE_GATHER = "beside_gather"
    """It runs while the tokens are gathered that a kernel behind it reads."""
    BESIDE_SCATTER = "beside_scatter"
    """It runs while what kernels before it have made is scattered, or summed over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a segment: what it computes and what it moves to and from device memory.

    Attributes:
        flops: 2 for each multiply-add; of causal attention of all pairs of tokens, and without
            the scores that flash attention makes again in its backward, as published rates count.
        shape: in the words of the kind; empty where it is not known.
        causal: half of its scores are masked. Attention that never writes them skips that half; a
            matrix product computes it.
        window: keys that each query sees at most, where attention skips all others; 0 if it does
            not. FLOPs are then those of all pairs inside the window.
        backward: it makes gradients.
        version: of attention's kernels: FlashAttention's first or second, or `CUDNN`.
        recorded_ps: picoseconds that it took in a run that was recorded, and takes on any GPU; 0
            leaves its time to the GPU.
        part: what it does in an operator that is fused with a collective; None if it is in none.
        spared: multiprocessors that it leaves to the kernel of that collective.
        streams: on which kernels like it, one behind the other, are issued: where one leaves
            multiprocessors free at its end, the next has begun.
        layout: of the operands of a product; None where it is not known.
    """

    kind: KernelKind
    flops: int
    bytes: int
    dtype: DType
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

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise KernelError(f"kernel: flops {self.flops} and bytes {self.bytes} must be >= 0")
        if self.recorded_ps < 0:
            raise KernelError(f"kernel: recorded_ps {self.recorded_ps} must be >= 0")

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes in which a product's operands are contiguous, along the inner extent and others.

        Of rows and columns of the result what divides both counts. 0 where nothing is contiguous,
        or it is not known.
        """
        if self.layout is None:
            return 0, 0
        _, m, n, k = self.shape
        size = self.dtype.size_bytes
        if self.layout is OperandLayout.TN:
            return 0, gcd(m, n) * size
        return k * size, n * size

    @property
    def causal_flops(self) -> int:
        """FLOPs of the pairs of tokens that are not masked, to half a row of scores.

        A window that begins before the sequence is masked there alone: of all queries as many as
        the window is wide lack half of it.
        """
        if not self.causal:
            return self.flops
        if not self.window:
            return self.flops // 2
        return self.flops - self.flops * self.window // (2 * self.keys)

    @property
    def keys(self) -> int:
        """Keys that attention reads."""
        return self.shape[4]

    @property
    def seen_keys(self) -> float:
        """Keys that a query of attention sees, in the mean of all."""
        reach = self.window or self.keys
        return reach * (1 - reach / (2 * self.keys)) if self.causal else reach

    @property
    def executed_flops(self) -> int:
        """FLOPs that take time.

        Attention skips the masked half. Its backward makes the scores again: five products instead
        of four (Dao et al. 2022, "FlashAttention", algorithm 4).
        """
        if self.kind is not KernelKind.ATTENTION:
            return self.flops
        return self.causal_flops * 5 // 4 if self.backward else self.causal_flops


def parts_of(kernels: Iterable[Kernel]) -> frozenset[FusedPart]:
    """Return the parts that kernels have in operators that are fused with collectives."""
    return frozenset(each.part for each in kernels if each.part is not None)


def matmul(
    m: int,
    n: int,
    k: int,
    dtype: DType,
    *,
    batch: int = 1,
    causal: bool = False,
    backward: bool = False,
    layout: OperandLayout | None = None,
) -> Kernel:
    """`batch` products of m x k with k x n, each operand read once and the result written."""
    return Kernel(
        kind=KernelKind.MATMUL,
        flops=2 * batch * m * n * k,
        bytes=batch * (m * k + k * n + m * n) * dtype.size_bytes,
        dtype=dtype,
        shape=(batch, m, n, k),
        causal=causal,
        backward=backward,
        layout=layout,
    )


def resized(product: Kernel, m: int, n: int, k: int) -> Kernel:
    """Return a product of other extents that is like `product` otherwise."""
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
    """Return a kernel that drops elements: it moves them, and a byte of mask for each."""
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
    """Attention whose scores stay on the chip; `shape` is in the words of `KernelKind`.

    It moves queries, keys, values and the result; backward also their gradients. With a `window`
    blocks of scores outside it are skipped (flash-attention 2.3, `window_size`).
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
