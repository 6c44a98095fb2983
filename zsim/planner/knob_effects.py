"""Options of runtimes by the effect of their values: on memory, or on lower bounds of a step."""

ADDS = frozenset(
    {
        "deepspeed.stage3_prefetch_bucket_size",
        "deepspeed.stage3_max_live_parameters",
        "deepspeed.stage3_max_reuse_distance",
        "fsdp2.reshard_after_forward",
        "fsdp2.gradient_sync",
        "fsdp2.forward_prefetch",
    }
)
"""Options whose other values gather earlier or free later than their defaults.

With these values, a rank keeps at least as much memory outside buffers of collectives: if that
fills the memory by default, it does with these values, too. Buffers may shrink for a model of few
layers: a rank that keeps gathered parameters gathers nothing during reductions. So if only buffers
exceed the memory, these values may still fit.
"""

LEANER = frozenset(
    {
        "fsdp1.no_sync",
        "fsdp1.sharding_strategy",
        "fsdp2.reshard_after_forward",
        "deepspeed.reduce_bucket_size",
        "deepspeed.stage3_max_reuse_distance",
        "deepspeed.stage3_prefetch_bucket_size",
        "deepspeed.zero_hpz_partition_size",
    }
)
"""Options with values whose lower bound of a step is below that of their defaults: they send or
copy less, or slow down concurrent kernels for less time."""

GATHERING_LESS = frozenset({"nanotron.tp_recompute_allgather"})
"""Options with values that lower the bound by collectives of the tensor axis."""
