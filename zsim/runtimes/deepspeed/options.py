"""Options of DeepSpeed's `zero_optimization` (0.19), under their names."""

import sys
from typing import Annotated

from pydantic import BeforeValidator, Field, Strict

from zsim.config_error import whole
from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag
from zsim.strategy.runtime_options import FloatFormat, Formats, RuntimeOptions

Elements = Annotated[int, Strict(), Field(ge=0, le=sys.maxsize), BeforeValidator(whole)]
"""A number of elements; Python's largest index stands for no limit."""


class DeepSpeed(RuntimeOptions):
    """Options of stages 1 to 3; elements, not bytes. The stage stands in the strategy.

    Attributes:
        reduce_bucket_size: gradients are reduced in buckets of at most so many elements.
        overlap_comm: reduce on a side stream; None is what DeepSpeed takes: stage 3 alone.
        communication_data_type: format in which gradients are reduced; None is that of the model.
        sub_group_size: stage 3: elements of a rank's shards that are updated at once.
        stage3_prefetch_bucket_size: stage 3: elements that one fetch gathers ahead.
        stage3_max_live_parameters: stage 3: gathered elements from which nothing is fetched ahead.
        stage3_max_reuse_distance: stage 3: parameters that are used again sooner are kept.
        stage3_param_persistence_threshold: stage 3: smaller parameters are never freed in a step.
        zero_hpz_partition_size: stage 3: ranks over which a secondary shard lies (ZeRO++ hpZ).
    """

    stages = (1, 2, 3)
    has_replicas = False
    takes_frozen = True

    reduce_bucket_size: Count = 500_000_000
    overlap_comm: Flag | None = None
    communication_data_type: FloatFormat | None = None
    sub_group_size: Count = 1_000_000_000
    stage3_prefetch_bucket_size: Elements = 50_000_000
    stage3_max_live_parameters: Elements = 1_000_000_000
    stage3_max_reuse_distance: Elements = 1_000_000_000
    stage3_param_persistence_threshold: Elements = 100_000
    zero_hpz_partition_size: Count = 1

    def inner(self, *, stage: int, data: int) -> tuple[str, int | None]:
        """Return the ranks over which a secondary shard lies."""
        del data
        size = self.zero_hpz_partition_size
        return "deepspeed.zero_hpz_partition_size", size if size > 1 and stage == 3 else None

    def alignment(self, *, stage: int, data: int) -> int:
        """Return the `nccl_start_alignment_factor` of `stage_1_and_2`: 4 bytes of fp16."""
        del data
        return 2 if stage < 3 else 1

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return formats: gradients add up as parameters are, at stage 1 as states are.

        DeepSpeed 0.16, `stage3.partition_grads` and `stage_1_and_2`, `grad_accum`.
        """
        return Formats(
            compute=compute,
            reduction=self.communication_data_type or compute,
            whole=optimizer if stage == 1 else compute,
            reduced=compute,
            optimizer=optimizer,
        )

    def smaller_buckets(self, elements: int) -> str | None:
        """Return the bucket size, if it is larger."""
        return f"reduce_bucket_size={elements}" if self.reduce_bucket_size > elements else None
