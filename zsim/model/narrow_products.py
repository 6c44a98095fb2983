"""Kernels and bytes of GEMMs in 8-bit and 4-bit formats: casts, scales, transposed copies.

The three GEMMs of a linear layer read two operands each: output (source, weight), source gradient
(gradient, weight), weight gradient (gradient, source). Each operand is read along both of its axes.
Scales of a part of an operand are along the inner extent, so an operand with such scales needs one
cast copy for each axis. With one scale for all of it, a transposed copy serves, and none is needed
if GEMMs read any layout (`nvte_is_non_tn_fp8_gemm_supported`, from Blackwell on).

Transformer Engine 2.20 (d0067d0) makes both copies of an operand in one kernel, and keeps that of
the source for backward (`_linear_forward_impl` of pytorch/module/linear.py). torchao 0.19 makes
each copy just before its GEMM (`mx_mm` of prototype/moe_training/mxfp8_linear.py). Nothing here
depends on a transformer: experts have the same GEMMs.
"""

from dataclasses import dataclass

from zsim.dtype import BlockFormat, DType, Multiplied
from zsim.model.kernel import Kernel, KernelKind
from zsim.strategy.execution import Float4, Float8, Quantizer, Recipe

Kernels = tuple[Kernel, ...]

FORMATS: dict[Recipe, Multiplied] = {
    Float8.TENSORWISE: DType.FP8,
    Float8.ROWWISE: DType.FP8,
    Float8.DELAYED: DType.FP8,
    Float8.BLOCKWISE: DType.FP8,
    Float8.MXFP8: BlockFormat.MXFP8,
    Float4.NVFP4: BlockFormat.NVFP4,
}
"""Format in which a GPU multiplies operands that are scaled so."""

ONE_SCALE = (Float8.TENSORWISE, Float8.DELAYED)
"""Scalings with one number for an operand: its copies along both axes have the same elements."""

MEASURED = (Float8.TENSORWISE, Float4.NVFP4)
"""Scalings that read an operand for its largest magnitude before the cast reads it again."""

SCALE_BITS = {
    Float8.BLOCKWISE: (32, 128, 128 * 128),
    Float8.MXFP8: (8, 32, 32),
    Float4.NVFP4: (8, 16, 16),
}
"""Bits of a scale, elements that share it, and elements of a weight that share it. Transformer
Engine repeats a scale of 16 x 16 elements of an NVFP4 weight in each row of these."""

SOURCE_BYTES = 2
"""Bytes of an element of the operands that are cast, which are in fp16 or bf16."""


def format_of(recipe: Recipe) -> Multiplied:
    """Return the format in which a GPU must multiply."""
    return FORMATS[recipe]


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowProducts:
    """How operands of narrow GEMMs are cast.

    Attributes:
        recipe: scaling.
        quantizer: library that casts.
        any_layout: GEMMs of operands with one scale read any layout.
    """

    recipe: Recipe
    quantizer: Quantizer
    any_layout: bool = False

    @property
    def dtype(self) -> Multiplied:
        """Format of the operands of the GEMMs."""
        return FORMATS[self.recipe]

    @property
    def joins_casts(self) -> bool:
        """True if an operand is cast once for both GEMMs that read it."""
        return self.quantizer is Quantizer.TRANSFORMER_ENGINE

    @property
    def copies(self) -> int:
        """Number of cast copies of an operand that two GEMMs read along both axes."""
        return 1 if self.any_layout and self.recipe in ONE_SCALE else 2

    def stored_bytes(
        self, rows: int, columns: int, *, copies: int = 1, weight: bool = False
    ) -> int:
        """Return the bytes of cast copies of an operand, with their scales."""
        elements = rows * columns
        bits = elements * (4 if self.recipe is Float4.NVFP4 else 8)
        if self.recipe is Float8.ROWWISE:
            bits += 32 * rows
        scale_bits, *shared = SCALE_BITS.get(self.recipe, (0, 1, 1))
        bits += scale_bits * -(-elements // shared[weight])
        return copies * -(-bits // 8)

    def cast(
        self,
        rows: int,
        columns: int,
        *,
        copies: int = 1,
        weight: bool = False,
        backward: bool = False,
        is_measured: bool = False,
    ) -> Kernels:
        """Return the kernels that cast an operand to `copies`.

        If another kernel has already measured its largest magnitude, it `is_measured`.
        """
        elements = rows * columns
        measures = self.recipe in MEASURED and not is_measured
        made = self.stored_bytes(rows, columns, copies=copies, weight=weight)
        read = SOURCE_BYTES * elements
        moved = (*((read,) if measures else ()), read + made)
        return tuple(_moving((rows, columns), each, backward=backward) for each in moved)

    def transposed(self, rows: int, columns: int, *, backward: bool = False) -> Kernels:
        """Return the kernel that copies a cast operand along its other axis, if GEMMs need it."""
        if self.copies == 1:
            return ()
        moved = 2 * self.stored_bytes(rows, columns)
        return (_moving((rows, columns), moved, backward=backward),)


def _moving(shape: tuple[int, int], moved: int, *, backward: bool) -> Kernel:
    """Return a kernel over operands of `shape` that moves this number of bytes."""
    rows, columns = shape
    return Kernel(
        kind=KernelKind.ELEMENTWISE,
        flops=rows * columns,
        bytes=moved,
        dtype=DType.BF16,
        shape=shape,
        backward=backward,
    )
