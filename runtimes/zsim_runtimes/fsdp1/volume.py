"""Data volumes of PyTorch's first FSDP: flat parameters, padded to the ranks.

There is one for each block and one for all other parameters. FULL_SHARD gathers a block for forward
and again for backward, SHARD_GRAD_OP once; the root is gathered once.
"""

from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces, wrapped
from zsim.model.model import Model
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp1.options import FSDP1, ShardingStrategy


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis and over the replicas."""
    options = strategy.options(FSDP1)
    ranks = strategy.parallel.data
    micro_batches = strategy.train.gradient_accumulation_steps
    inside, outside = wrapped(model)
    flat = [sum(each.elements for each in own) for own in (*(own for _, own in inside), outside)]
    *blocks, root = (-(-size // ranks) for size in flat)
    frees = options.sharding_strategy is ShardingStrategy.FULL_SHARD
    reductions = 1 if options.no_sync else micro_batches
    rounds = micro_batches if frees else reductions
    gathered = rounds * ((2 if frees else 1) * sum(blocks) + root)
    size = strategy.train.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.train.precision.compute).size_bytes
    scattered = (ranks - 1) * (sum(blocks) + root)
    return [
        WireBytes(group="data", collective="all_gather", bytes=(ranks - 1) * gathered * size),
        WireBytes(group="data", collective="reduce_scatter", bytes=reductions * scattered * wire),
        *all_reduces(
            "replicate",
            (*blocks, root) * reductions,
            ranks=strategy.parallel.replicate,
            size_bytes=wire,
        ),
    ]


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of copies of gradients into flat ones, and of their cast and division.

    With an odd number of ranks, all of the division follows the reduction.
    """
    options, size = strategy.options(FSDP1), strategy.train.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.train.precision.compute).size_bytes
    micro_batches = strategy.train.gradient_accumulation_steps
    trained = sum(each.elements for each in model.parameters)
    each = (size + wire if wire != size else 0) + (2 * wire if strategy.replicas % 2 == 0 else 0)
    reductions = 1 if options.no_sync else micro_batches
    return CopiedBytes(
        compute=micro_batches * trained * 2 * size, beside=reductions * trained * each
    )


VOLUME = DataVolume(data=data, copied=copied)


def volume(strategy: Strategy) -> DataVolume:
    """Return the data volumes of every schedule."""
    del strategy
    return VOLUME
