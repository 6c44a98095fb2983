"""Options of zsim's own ZeRO stages that files and `Strategy` have in common."""

from enum import StrEnum

from zsim.strategy.config_table import Count, Flag, Table, Whole


class Keep(StrEnum):
    """Parameters that stay gathered between forward and backward in stage 3."""

    NOTHING = "nothing"
    EVERYTHING = "everything"


class FusedBuffers(StrEnum):
    """Sizes of the buckets that fuse gradients for one collective and one update.

    CONSTANT: at most `bucket_elements`, regardless of the model's size (ZeRO-R CB, Rajbhandari et
    al. 2020, section 6.2). MODEL: one bucket for all gradients and their fp32 copy, as in trainers
    before ZeRO.
    """

    CONSTANT = "constant"
    MODEL = "model"


BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`."""


class ZeroKnobs(Table):
    """Keys of `[zero]` that files and `Strategy` have in common: options of zsim's own stages.

    Attributes:
        bucket_elements: parameters are gathered and gradients reduced in buckets of at most this
            number of elements (a larger parameter has a separate bucket).
        first_bucket_elements: stages 0 to 2: limit of the bucket that backward completes first, so
            that its reduction starts early; None for the limit of the others.
        fused_buffers: stages 0 to 2: buckets of constant size, or one for all parameters.
        contiguous: gradients and checkpoints are moved into contiguous memory that is allocated in
            setup and never freed (ZeRO-R MD, section 6.3).
        prefetch_units: stage 3: number of units by which gathers are issued ahead of compute.
        gathered_elements: stage 3: a gather is not issued ahead if more than this number of
            elements would be gathered at once; None for no limit. Parameters of the computing unit
            are always gathered.
        keep_after_forward: stage 3: parameters that stay gathered from forward to backward.
        reduce_once: stages 2 and 3: accumulate whole gradients and reduce them in the last
            micro-batch, instead of in each. Stages 0 and 1 always do.
        reductions_in_flight: gradient buckets whose reduction may be unfinished while backward
            continues; with 0, compute waits for each reduction.
        host_ahead_units: number of units that the host may issue ahead of the device, in forward
            and backward; None for no limit.
        secondary: stage 3: after the first forward of a step, parameters stay sharded over this
            number of neighboring ranks of the data axis, among which later gathers run (hpZ, Wang
            et al. 2023, section 3.2); None keeps no secondary shards.
        tiles: stage 3: number of tiles of each linear layer of blocks, split along its outputs;
            each is gathered, used and freed as a separate unit (memory-centric tiling, Rajbhandari
            et al. 2021, section 5.1.3); 1 does not split.
        sequence_parallel: with a tensor axis, shard hidden states between attention and MLP by
            tokens: each rank computes norms and residuals of its tokens (Korthikanti et al. 2022,
            section 4.2.2).
    """

    bucket_elements: Count = BUCKET_ELEMENTS
    first_bucket_elements: Count | None = None
    fused_buffers: FusedBuffers = FusedBuffers.CONSTANT
    contiguous: Flag = False
    prefetch_units: Whole = 1
    gathered_elements: Whole | None = None
    keep_after_forward: Keep = Keep.NOTHING
    reduce_once: Flag = False
    reductions_in_flight: Whole = 1
    host_ahead_units: Count | None = None
    secondary: Count | None = None
    tiles: Count = 1
    sequence_parallel: Flag = False
