"""Knobs of zsim's own ZeRO stages, as a file and a `Strategy` write them alike."""

from enum import StrEnum

from zsim.strategy.config_table import Count, Flag, Table, Whole


class Keep(StrEnum):
    """Parameters that stay gathered between forward and backward in stage 3."""

    NOTHING = "nothing"
    EVERYTHING = "everything"


class FusedBuffers(StrEnum):
    """Sizes of buffers in which gradients are fused for one collective and one update.

    CONSTANT: at most `bucket_elements`, however large the model (ZeRO-R CB, Rajbhandari et al.
    2020, section 6.2). MODEL: all gradients in one, and all of their fp32 copy, as trainers had it
    before.
    """

    CONSTANT = "constant"
    MODEL = "model"


BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`."""


class ZeroKnobs(Table):
    """Keys of `[zero]` that a file and a `Strategy` write alike: knobs of zsim's own stages.

    Attributes:
        bucket_elements: parameters are gathered and gradients reduced in buckets of at most so many
            elements (a larger parameter is a bucket of its own).
        first_bucket_elements: stages 0 to 2: limit of the bucket that backward completes first, so
            that its reduction begins early; None is that of the others.
        fused_buffers: stages 0 to 2: whether buckets are of a constant size, or one for all.
        contiguous: gradients and checkpoints are moved into memory that set-up allocates, where
            they lie in a row for good (ZeRO-R MD, section 6.3).
        prefetch_units: stage 3: units whose gather is issued ahead of the one that computes.
        gathered_elements: stage 3: a gather is not issued ahead while more elements than these
            would be gathered at once; None does not limit. What the unit at hand needs is always
            gathered.
        keep_after_forward: stage 3: parameters that stay gathered from forward to backward.
        reduce_once: stages 2 and 3: accumulate whole gradients and reduce in the last micro-batch,
            instead of in each. Stages 0 and 1 always do.
        reductions_in_flight: gradient buckets whose reduction may be unfinished while backward goes
            on; at 0 compute waits for each reduction.
        host_ahead_units: units that the host may issue ahead of the device, in forward and
            backward; None does not limit.
        secondary: stage 3: after the first forward of a step parameters stay sharded over so many
            neighbouring ranks of the data axis, where later gathers find them (hpZ, Wang et al.
            2023, section 3.2); None keeps no secondary shards.
        tiles: stage 3: linear layers of blocks are cut along their outputs into so many tiles, each
            gathered, used and freed like a unit of its own (memory-centric tiling, Rajbhandari et
            al. 2021, section 5.1.3); 1 cuts none.
        sequence_parallel: with a tensor axis, cut what flows between attention and MLP by tokens:
            each rank has the norms and residuals of its own (Korthikanti et al. 2022, section
            4.2.2).
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
