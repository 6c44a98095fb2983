"""What a segment costs: its kernels, by what limits them."""

from dataclasses import dataclass
from enum import StrEnum

from zsim.dtype import DType


class KernelError(ValueError):
    """A kernel that cannot exist."""


class KernelKind(StrEnum):
    """What limits a kernel: matrix units, or memory."""

    MATMUL = "matmul"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a segment: what it computes and what it moves to and from device memory."""

    kind: KernelKind
    flops: int
    bytes: int
    dtype: DType

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise KernelError(f"kernel: flops {self.flops} and bytes {self.bytes} must be >= 0")
