"""Parameters and gradients in PyTorch's FSDP2, padded along the first dimension of each parameter.

A group per block and one for all other parameters. With W ranks a parameter of d rows takes
ceil(d / W) W rows on the wire. Blocks are gathered for forward and, where they were freed, again
for backward; the root once.
"""

from collections import Counter
from math import prod

from zsim.closed_form.ring import all_reduces
from zsim.closed_form.volume import DataVolume
from zsim.model import Model
from zsim.runtime.fsdp2 import FSDP2, Sync
from zsim.schedule import WireBytes
from zsim.strategy import Strategy


def shards(model: Model, ranks: int) -> tuple[list[int], int]:
    """Elements of a rank's shard of each block that has parameters of its own, and of the root."""
    users = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    own: list[int] = []
    root = 0
    seen: set[str] = set()
    for unit in model.units:
        block = 0
        for parameter in unit.parameters:
            rows, *others = parameter.shape or (1,)
            share = -(-rows // ranks) * prod(others)
            if unit.checkpoint and users[parameter.name] == 1:
                block += share
            elif parameter.name not in seen:
                root += share
            seen.add(parameter.name)
        if any(unit.checkpoint and users[each.name] == 1 for each in unit.parameters):
            own.append(block)
    return own, root


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis, its inner part, and the replicas."""
    options = strategy.options(FSDP2)
    ranks = strategy.data
    blocks, root = shards(model, ranks)
    size = strategy.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.precision.compute).size_bytes
    micro_batches = strategy.gradient_accumulation_steps
    kept = not options.reshard_after_backward
    roots = 1 if kept else micro_batches
    again = 0 if options.reshard_after_forward is False else micro_batches
    inner = 0
    if strategy.inner is not None:
        # A rank has 1 of `inner` parts of the padded whole; the others come from its neighbours.
        part = sum(blocks) * ranks // strategy.inner
        inner, again = micro_batches * (strategy.inner - 1) * part * size, 0
    gathered = (ranks - 1) * ((roots + again) * sum(blocks) + roots * root) * size
    syncs = 1 if options.gradient_sync is Sync.LAST else micro_batches
    scattered = syncs * (ranks - 1) * (sum(blocks) + root) * wire
    sums = 1 if Sync.LAST in (options.gradient_sync, options.all_reduce) else micro_batches
    return [
        WireBytes(group="data", collective="all_gather", bytes=gathered),
        WireBytes(group="inner", collective="all_gather", bytes=inner),
        WireBytes(group="data", collective="reduce_scatter", bytes=scattered),
        *all_reduces(
            "replicate", (*blocks, root) * sums, ranks=strategy.replicate, size_bytes=wire
        ),
    ]


VOLUME = DataVolume(data=data)
