"""Search space of DistributedDataParallel."""

from zsim.runtimes.search import KeptBytes, Knobs, SearchedAxes, SearchSpace
from zsim.strategy.strategy import Strategy
from zsim_runtimes.ddp.options import DDP


def kept(strategy: Strategy) -> KeptBytes:
    """Return the memory of persistent buckets, of `.grad`, and of weights cast by autocast.

    Autocast keeps no weights in the compute dtype from step to step.
    """
    options, precision = strategy.options(DDP), strategy.train.precision
    size, views = precision.optimizer.size_bytes, options.gradient_as_bucket_view
    cast = precision.compute.size_bytes if precision.has_master else 0
    several = strategy.train.gradient_accumulation_steps > 1
    return KeptBytes(
        permanent=size - cast,
        accumulated=size if several and (options.no_sync or not views) else 0,
        done=0 if several or views else size,
        cast=cast,
    )


def _knobs(axes: SearchedAxes) -> Knobs:
    del axes
    return {
        "gradient_as_bucket_view": (False, True),
        "comm_hook": ("none", "bf16_compress"),
    }


SEARCH = SearchSpace(
    kept=kept,
    knobs=_knobs,
    leaner=frozenset({"gradient_as_bucket_view", "comm_hook"}),
)
