"""Parameters and gradients in Megatron-LM's distributed optimizer: once a step, buckets padded.

Parameters stand in the reverse order of the model, each from a multiple of 64 elements on; a bucket
is closed once it is large enough, at a multiple of the ranks and of 128. With hidden states cut by
tokens those that are not cut are summed over the tensor axis as one.
"""

from math import lcm

from zsim.closed_form.data_volume import DataVolume, all_reduces
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.runtimes.megatron.options import Megatron
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def padded(model: Model, ranks: int, options: Megatron) -> list[int]:
    """Return elements of each bucket, gaps and padding included.

    In a pipeline only buckets of what is given nothing have a size.
    """
    has_size = options.overlap_grad_reduce and not model.given
    limit = options.bucket_size or max(40 * 10**6, 10**6 * ranks)
    multiple = lcm(ranks, 128)
    sizes: list[int] = []
    filled = 0
    for parameter in reversed(model.parameters):
        if has_size and filled >= limit:
            sizes.append(filled)
            filled = 0
        filled = -(-filled // 64) * 64 + parameter.elements
    return [-(-size // multiple) * multiple for size in (*sizes, filled)]


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, and over the replicas of the sharded states."""
    options = strategy.options(Megatron)
    ranks = strategy.parallel.data
    shards = [size // ranks for size in padded(model, ranks, options)]
    wire = strategy.train.precision.compute.size_bytes
    reduced = DType.FP32.size_bytes if options.grad_reduce_in_fp32 else wire
    sent = (ranks - 1) * sum(shards)
    cut = any(value.tensor_sharded for value in model.values.values())
    copies = sum(each.elements for each in model.parameters if cut and not each.tensor_sharded)
    return [
        *all_reduces("tensor", [copies], ranks=strategy.parallel.tensor, size_bytes=reduced),
        WireBytes(group="data", collective="all_gather", bytes=sent * wire),
        WireBytes(group="data", collective="reduce_scatter", bytes=sent * reduced),
        *all_reduces("replicate", shards, ranks=strategy.parallel.replicate, size_bytes=reduced),
    ]


VOLUME = DataVolume(data=data)
