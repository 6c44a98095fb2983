"""Options of Megatron-LM's distributed optimizer (`DistributedDataParallelConfig`, 2026-08)."""

from math import gcd
from typing import Self

from pydantic import model_validator

from zsim.config_error import refusal, refuse
from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag
from zsim.strategy.runtime_options import Formats, RuntimeOptions


class Megatron(RuntimeOptions):
    """Options of the wrapper of the model, with `use_distributed_optimizer`.

    Attributes:
        bucket_size: with overlap_grad_reduce, elements from which a bucket is closed; None is
            max(40e6, 1e6 x data). Without, there is one bucket.
        overlap_grad_reduce: reduce a bucket while backward goes on; false has one bucket.
        overlap_param_gather: gather parameters while the next forward goes on; needs
            overlap_grad_reduce.
        grad_reduce_in_fp32: collect and reduce gradients in fp32.
        average_in_collective: let the collective divide, instead of scaling before.
        sequence_parallel: with a tensor axis, what flows between attention and MLP is cut by tokens
            (`TransformerConfig.sequence_parallel`).
    """

    stages = (1,)
    has_pipeline = True
    even_stages = True

    bucket_size: Count | None = None
    overlap_grad_reduce: Flag = False
    overlap_param_gather: Flag = False
    grad_reduce_in_fp32: Flag = False
    average_in_collective: Flag = False
    sequence_parallel: Flag = False

    @property
    def cuts_tokens(self) -> bool:
        """True if hidden states are cut by tokens over the tensor axis."""
        return self.sequence_parallel

    @model_validator(mode="after")
    def _need_agreement(self) -> Self:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            refuse([refusal("overlap_param_gather", None, "true needs overlap_grad_reduce = true")])
        return self

    def alignment(self, *, stage: int, data: int) -> int:
        """Return what buckets of multiples of 128 leave (`param_and_grad_buffer.py`)."""
        del stage
        return 128 // gcd(128, data)

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return formats: one buffer collects and reduces (`grad_reduce_in_fp32`)."""
        del stage
        wide = DType.FP32 if self.grad_reduce_in_fp32 else compute
        return Formats(
            compute=compute, reduction=wide, whole=wide, reduced=wide, optimizer=optimizer
        )
