"""Search space of FSDP1."""

from zsim.runtimes.search import KeptBytes, Knobs, SearchedAxes, SearchSpace
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp1.options import FSDP1, BackwardPrefetch, ShardingStrategy


def kept(strategy: Strategy) -> KeptBytes:
    """Return the memory of whole parameters and gradients; the root is never resharded."""
    options, precision = strategy.options(FSDP1), strategy.train.precision
    several = strategy.train.gradient_accumulation_steps > 1
    stays = options.sharding_strategy is ShardingStrategy.SHARD_GRAD_OP
    looks_ahead = options.backward_prefetch is BackwardPrefetch.PRE
    size = precision.optimizer.size_bytes
    return KeptBytes(
        gathered=frozenset(["root"] + ["blocks"] * stays + ["ahead"] * looks_ahead),
        accumulated=precision.compute.size_bytes if several and options.no_sync else 0,
        shard=size if several and not options.no_sync else 0,
        done_shard=0 if several else size,
    )


def _knobs(axes: SearchedAxes) -> Knobs:
    del axes
    return {
        "sharding_strategy": ("full_shard", "shard_grad_op"),
        "forward_prefetch": (False, True),
        "limit_all_gathers": (True, False),
        "no_sync": (False, True),
    }


SEARCH = SearchSpace(
    kept=kept,
    knobs=_knobs,
    checkpoints_on_host={"offload_wrapper": True},
    leaner=frozenset({"no_sync", "sharding_strategy"}),
)
