"""Options of PyTorch's first FSDP: `FullyShardedDataParallel` around every block (torch 2.13)."""

from enum import StrEnum

from zsim.dtype import DType
from zsim.strategy.config_table import Flag
from zsim.strategy.runtime_options import FloatFormat, Formats, RuntimeOptions


class ShardingStrategy(StrEnum):
    """States sharded over the data axis; with several replicas, these are the hybrid strategies."""

    FULL_SHARD = "full_shard"
    SHARD_GRAD_OP = "shard_grad_op"


class BackwardPrefetch(StrEnum):
    """When backward gathers the next unit: before the gradients of this one, after, or never."""

    PRE = "backward_pre"
    POST = "backward_post"
    NONE = "none"


class FSDP1(RuntimeOptions):
    """Options of `FullyShardedDataParallel`.

    Attributes:
        sharding_strategy: with several replicas, FULL_SHARD is HYBRID_SHARD, and SHARD_GRAD_OP is
            _HYBRID_SHARD_ZERO2.
        backward_prefetch: when backward gathers ahead, if at all.
        forward_prefetch: forward gathers the next unit before this one computes.
        limit_all_gathers: the host waits while two gathered units are not freed.
        reduce_dtype: dtype in which gradients are reduced; None for the parameters' dtype.
        no_sync: accumulate whole gradients before the last micro-batch.
        offload_wrapper: with full checkpointing, `offload_wrapper(checkpoint_wrapper(block))`
            (`torch.distributed.algorithms._checkpoint.checkpoint_wrapper`): inputs of checkpointed
            blocks are in pinned host memory until recompute.
        repeat_kv: keys and values are copied for each of the heads that share them (`zero.ddp`).
    """

    stages = (3,)
    trains_narrow = True
    takes_quantized = True
    checkpoints_every_nth = True
    checkpoint_option = "offload_wrapper"

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    backward_prefetch: BackwardPrefetch = BackwardPrefetch.PRE
    forward_prefetch: Flag = False
    limit_all_gathers: Flag = True
    reduce_dtype: FloatFormat | None = None
    no_sync: Flag = False
    offload_wrapper: Flag = False
    repeat_kv: Flag = False

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return dtypes: whole gradients accumulate in that of parameters, sharded ones in theirs.

        torch 2.13, `_runtime_utils._accumulate_sharded_grad`.
        """
        del stage
        return Formats(
            compute=compute,
            reduction=self.reduce_dtype or compute,
            whole=compute,
            reduced=optimizer,
            optimizer=optimizer,
        )
