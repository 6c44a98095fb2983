"""Dtypes in training."""

from enum import StrEnum

from zsim.dtype import DType


class Precision(StrEnum):
    """Precision of training, named by the dtype of parameters and gradients.

    FP16 and BF16 keep fp32 master weights (Micikevicius et al. 2018, section 3.1). PURE_BF16, FP32
    and FP64 update the parameters directly, with moments in their dtype. FP64 is for tests.
    """

    FP16 = "fp16"
    BF16 = "bf16"
    PURE_BF16 = "pure_bf16"
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def compute(self) -> DType:
        """Dtype of parameters, gradients and activations."""
        return _COMPUTE[self]

    @property
    def optimizer(self) -> DType:
        """Dtype of master weights and moments."""
        return _OPTIMIZER[self]

    @property
    def wide(self) -> DType:
        """Dtype in which kernels accumulate: statistics of norms and softmax, and the loss."""
        return DType.FP64 if self is Precision.FP64 else DType.FP32

    @property
    def has_master(self) -> bool:
        """True if the optimizer keeps a separate copy of the parameters."""
        return self.compute is not self.optimizer


_COMPUTE = {precision: DType(precision.value.removeprefix("pure_")) for precision in Precision}
_OPTIMIZER = {
    Precision.FP16: DType.FP32,
    Precision.BF16: DType.FP32,
    Precision.PURE_BF16: DType.BF16,
    Precision.FP32: DType.FP32,
    Precision.FP64: DType.FP64,
}
