"""Number formats, with their size. Not precision policies: those are `zsim.strategy.strategy`."""

from enum import StrEnum


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
