"""Options of runtimes by what their values change: memory, or lower bounds of a step."""

ADDS = frozenset(
    {
        "deepspeed.stage3_prefetch_bucket_size",
        "deepspeed.stage3_max_live_parameters",
        "deepspeed.stage3_max_reuse_distance",
        "fsdp2.reshard_after_forward",
        "fsdp2.gradient_sync",
        "fsdp2.forward_prefetch",
        "nanotron.tp_recompute_allgather",
    }
)
"""Options whose other values keep more in memory, or for longer, than their defaults do.

The peak of a small model may come out less than a thousandth lower all the same. What fits by so
little is at the edge of memory, which is ranked last.
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
