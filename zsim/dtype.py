"""Number formats, with their size. Not precision policies: those are `zsim.strategy.strategy`."""

from enum import StrEnum
from typing import Final


class DType(StrEnum):
    """Format of one element, named as the field names it; fp8 is any of 8 bits.

    Two elements of nf4 share a byte (Dettmers et al. 2023, "QLoRA", section 3).
    """

    NF4 = "nf4"
    INT8 = "int8"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"
    INT64 = "int64"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element; of nf4, rounded up."""
        return SIZE_BYTES[self]

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of a buffer of `elements`."""
        return -(-elements // 2) if self is DType.NF4 else elements * SIZE_BYTES[self]


SIZE_BYTES = {
    DType.NF4: 1,
    DType.INT8: 1,
    DType.FP8: 1,
    DType.FP16: 2,
    DType.BF16: 2,
    DType.FP32: 4,
    DType.FP64: 8,
    DType.INT64: 8,
}
assert set(SIZE_BYTES) == set(DType)


class BlockFormat(StrEnum):
    """Format of operands of matrix products whose blocks have scales; no tensor is added in it."""

    MXFP8 = "mxfp8"
    """Elements of 8 bits; 32 of them share a scale of 8 bits (OCP Microscaling Formats 1.0)."""
    NVFP4 = "nvfp4"
    """Elements of 4 bits (E2M1); 16 of them share a scale of 8 bits, a tensor one of 32 bits."""


Multiplied = DType | BlockFormat
"""Format of the operands of a kernel."""
WEIGHTS_BLOCK: Final = 64
"""Elements of a weight that share a scale (`blocksize` of `quantize_4bit`)."""

SCALES_BLOCK: Final = 256
"""Number of scales that share a second-level scale with double quantization."""

SCALE_BYTES: Final = 4


class Quantization(StrEnum):
    """Formats of frozen weights: nf4, with its scales in fp32 or in 8 bits.

    As `Linear4bit` of bitsandbytes 0.45 keeps them.
    """

    NF4 = "nf4"
    NF4_DOUBLE = "nf4_double"
    """Double quantization (`bnb_4bit_use_double_quant`): scales are quantized once more."""

    def scale_bytes(self, elements: int) -> int:
        """Return the bytes of the scales of a weight."""
        blocks = -(-elements // WEIGHTS_BLOCK)
        if self is Quantization.NF4:
            return blocks * SCALE_BYTES
        return blocks + -(-blocks // SCALES_BLOCK) * SCALE_BYTES
