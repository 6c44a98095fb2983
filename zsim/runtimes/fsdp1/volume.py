"""Parameters and gradients in PyTorch's first FSDP: flat parameters, padded to the ranks.

One for each block and one for all other parameters. FULL_SHARD gathers a block for forward and
again for backward, SHARD_GRAD_OP once; the root is gathered once.
"""

from collections import Counter

from zsim.closed_form.data_volume import DataVolume
from zsim.closed_form.ring import all_reduces
from zsim.model.model import Model
from zsim.runtimes.fsdp1.options import FSDP1, ShardingStrategy
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def flat_elements(model: Model) -> tuple[list[int], int]:
    """Elements of the flat parameter of each block that has one, and of the root."""
    users = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    blocks: list[int] = []
    own: set[str] = set()
    for unit in model.units:
        inside = [each for each in unit.parameters if unit.checkpoint and users[each.name] == 1]
        if inside:
            blocks.append(sum(parameter.elements for parameter in inside))
            own.update(parameter.name for parameter in inside)
    return blocks, sum(each.elements for each in model.parameters if each.name not in own)


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis and over the replicas."""
    options = strategy.options(FSDP1)
    ranks = strategy.data
    micro_batches = strategy.gradient_accumulation_steps
    flat, flat_root = flat_elements(model)
    blocks, root = [-(-size // ranks) for size in flat], -(-flat_root // ranks)
    frees = options.sharding_strategy is ShardingStrategy.FULL_SHARD
    reductions = 1 if options.no_sync else micro_batches
    rounds = micro_batches if frees else reductions
    gathered = rounds * ((2 if frees else 1) * sum(blocks) + root)
    size = strategy.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.precision.compute).size_bytes
    scattered = (ranks - 1) * (sum(blocks) + root)
    return [
        WireBytes(group="data", collective="all_gather", bytes=(ranks - 1) * gathered * size),
        WireBytes(group="data", collective="reduce_scatter", bytes=reductions * scattered * wire),
        *all_reduces(
            "replicate",
            (*blocks, root) * reductions,
            ranks=strategy.replicate,
            size_bytes=wire,
        ),
    ]


VOLUME = DataVolume(data=data)
