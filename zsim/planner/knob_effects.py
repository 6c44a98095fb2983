"""Options of runtimes by what their values change: memory, or lower bounds of a step."""

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
"""Options whose other values gather sooner or free later than their defaults do.

What a rank has alive beside buffers of collectives is as much, or more: where that fills the
memory, it does with these values. Of buffers a model of few layers may need less: one that keeps
what it gathered gathers nothing while it reduces. So where these lack memory nothing is certain.
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
"""Options with values that lower bounds of a step below those of their defaults: they send or copy
less, or slow kernels beside them for less time."""

GATHERING_LESS = frozenset({"nanotron.tp_recompute_allgather"})
"""Options with values that lower them by collectives of the tensor axis."""
