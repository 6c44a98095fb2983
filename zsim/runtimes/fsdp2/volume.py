"""Parameters and gradients in PyTorch's FSDP2, padded along the first dimension of each parameter.

A group per block and one for all other parameters. With W ranks a parameter of d rows takes
ceil(d / W) W rows on the wire. Blocks are gathered for forward and, where they were freed, again
for backward; the root once. Frozen parameters are gathered and not reduced. A block before the
first gradient has no backward; the last of these is gathered for it all the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from zsim.closed_form.checkpoint import goes_back
from zsim.closed_form.data_volume import DataVolume, all_reduces, wrapped
from zsim.model.model import Model, Parameter
from zsim.runtimes.fsdp2.options import FSDP2, Sync
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


@dataclass(slots=True)
class GroupShare:
    """Elements of a rank's shard of a group, and of those that are trained.

    Of a block, whether it has a backward, and whether it is gathered for one.
    """

    elements: int
    trained: int
    back: bool = True
    again: bool = True


def share(parameters: Sequence[Parameter], ranks: int) -> GroupShare:
    """Return a rank's share of a group: the same rows of each parameter."""
    sizes = {
        each: -(-(each.shape or (1,))[0] // ranks) * prod(each.shape[1:]) for each in parameters
    }
    trained = sum(size for each, size in sizes.items() if not each.frozen)
    return GroupShare(elements=sum(sizes.values()), trained=trained)


def groups(model: Model, ranks: int) -> tuple[list[GroupShare], GroupShare]:
    """Return each block that has parameters of its own, and the root."""
    inside, outside = wrapped(model)
    blocks: list[GroupShare] = []
    for unit, own in inside:
        blocks.append(share(own, ranks))
        blocks[-1].back = goes_back(model, unit)
    behind = bool(outside)  # the root gathers the last block before its backward
    for block in reversed(blocks):
        block.again = block.back or behind
        behind = block.back
    return blocks, share(outside, ranks)


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, its inner part, and the replicas."""
    options = strategy.options(FSDP2)
    ranks = strategy.parallel.data
    blocks, root = groups(model, ranks)
    size = strategy.train.precision.compute.size_bytes
    wire = (options.reduce_dtype or strategy.train.precision.compute).size_bytes
    micro_batches = strategy.train.gradient_accumulation_steps
    kept = not options.reshard_after_backward
    gathered = root.elements * (1 if kept else micro_batches)
    inner = 0
    for block in blocks:
        stays = options.reshard_after_forward is False
        again = 0 if stays or not block.again else micro_batches
        whole = 1 if kept and (block.back or stays) else micro_batches
        if strategy.inner is None:
            gathered += (whole + again) * block.elements
            continue
        if kept and not block.back:  # still sharded over the inner ranks
            again, whole = again + micro_batches - 1, 1
        gathered += whole * block.elements
        # A rank has 1 of `inner` parts of the padded whole; others come from its neighbours.
        inner += (strategy.inner - 1) * (again * block.elements * ranks // strategy.inner)
    trained = [each.trained for each in (*blocks, root)]
    syncs = 1 if options.gradient_sync is Sync.LAST else micro_batches
    sums = 1 if Sync.LAST in (options.gradient_sync, options.all_reduce) else micro_batches
    return [
        WireBytes(group="data", collective="all_gather", bytes=(ranks - 1) * gathered * size),
        WireBytes(group="inner", collective="all_gather", bytes=inner * size),
        WireBytes(
            group="data",
            collective="reduce_scatter",
            bytes=syncs * (ranks - 1) * sum(trained) * wire,
        ),
        *all_reduces(
            "replicate", trained * sums, ranks=strategy.parallel.replicate, size_bytes=wire
        ),
    ]


VOLUME = DataVolume(data=data)
