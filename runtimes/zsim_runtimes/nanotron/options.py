"""Options of nanotron, a Megatron-like trainer with its own ZeRO-1 (2025-02)."""

from enum import StrEnum

from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag
from zsim.strategy.runtime_options import Formats, RuntimeOptions

MIB = 2**20


class TensorMode(StrEnum):
    """Collectives of tensor parallelism."""

    ALL_REDUCE = "all_reduce"
    """All-reduces: ranks hold copies of the hidden state (Shoeybi et al. 2019, section 3)."""
    REDUCE_SCATTER = "reduce_scatter"
    """Reduce-scatters and all-gathers: each holds its own tokens (Korthikanti et al. 2022)."""


class Nanotron(RuntimeOptions):
    """Keys of its `parallelism` and `model` sections on which a schedule depends.

    Attributes:
        tp_mode: how the ranks of the tensor axis communicate.
        tp_recompute_allgather: with reduce_scatter, gather what linear layers read again in
            backward, instead of keeping it.
        ddp_bucket_cap_mb: MiB of gradients from which a bucket of PyTorch's
            DistributedDataParallel is closed, which stage 0 has.
        keep_head_whole: no stage of a pipeline ends between the head and its loss, and one is full
            that has just its share.
    """

    stages = (0, 1)
    has_replicas = False
    has_pipeline = True
    sums_copies = True

    tp_mode: TensorMode = TensorMode.ALL_REDUCE
    tp_recompute_allgather: Flag = True
    ddp_bucket_cap_mb: Count = 25
    keep_head_whole: Flag = False

    @property
    def cuts_tokens(self) -> bool:
        """True if hidden states are cut by tokens over the tensor axis."""
        return self.tp_mode is TensorMode.REDUCE_SCATTER

    @property
    def keeps_gathered(self) -> bool:
        """True if what linear layers gathered is kept for backward."""
        return not self.tp_recompute_allgather

    @property
    def head_is_on_one_stage(self) -> bool:
        """Return whether norm, head, cast and loss are on one stage, the last."""
        return self.keep_head_whole

    @property
    def in_place_loss(self) -> bool:
        """True: the gradient of the logits always takes the place of their softmax."""
        return True

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return formats: gradients are kept in fp32 (`FP32GradientAccumulator`)."""
        del stage
        wide = DType.FP32
        return Formats(
            compute=compute, reduction=wide, whole=wide, reduced=wide, optimizer=optimizer
        )
