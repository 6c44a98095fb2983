"""Number formats, with their size. Not precision policies: those are `zsim.strategy.strategy`."""

from enum import StrEnum


class DType(StrEnum):
    """Format of one element, named as the field names it; fp8 is any of 8 bits."""

    INT8 = "int8"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"
    INT64 = "int64"

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return SIZE_BYTES[self]


SIZE_BYTES = {
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
