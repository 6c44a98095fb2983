"""Parameters and gradients in Megatron-LM: once a step, buckets padded.

Parameters stand in the reverse order of the model, each from a multiple of 64 elements on; a bucket
is closed once it is large enough, at a multiple of the ranks and of 128. With hidden states cut by
tokens those that are not cut are summed over the tensor axis as one. In a pipeline each chunk of a
stage has buckets of its own, of which only those of the first have a size; a tied embedding is one,
and its gradients are summed over the first and the last stage as well. Without the distributed
optimizer (stage 0) there are no gaps, and a tied embedding stands among the others.
"""

from collections.abc import Set
from math import lcm

from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces
from zsim.closed_form.stored_layers import stored_bytes
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.model.pipeline_stages import Stage
from zsim.runtimes.megatron.options import Megatron
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.strategy import Strategy


def padded(
    model: Model,
    ranks: int,
    options: Megatron,
    *,
    shards: bool,
    has_size: bool = True,
    alone: Set[str] = frozenset(),
) -> list[int]:
    """Return elements of each bucket, gaps and padding included; some parameters stand `alone`."""
    start, end = (64, 128) if shards else (1, 1)
    limit = (has_size and options.bucket_elements(data=ranks)) or 0
    multiple = lcm(ranks, end)
    sizes: list[int] = []
    filled = 0
    for parameter in reversed(model.parameters):
        if filled and (parameter.name in alone or (limit and filled >= limit)):
            sizes.append(filled)
            filled = 0
        filled = -(-filled // start) * start + parameter.elements
        if parameter.name in alone:
            sizes.append(filled)
            filled = 0
    return [-(-size // multiple) * multiple for size in (*sizes, filled)]


def has_sizes(options: Megatron, *, is_first: bool) -> bool:
    """Return whether buckets of a chunk have a size: of the first one, unless they are summed."""
    return is_first or options.allreduce_in_float32


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, and over the replicas of the sharded states."""
    options = strategy.options(Megatron)
    sizes = padded(model, strategy.parallel.data, options, shards=strategy.zero.stage == 1)
    return _moved(model, strategy, sizes)


def of_stage(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Return the same of a stage of a pipeline, and sums of tied embeddings."""
    options, ranks = strategy.options(Megatron), strategy.parallel.data
    shards = strategy.zero.stage == 1
    alone = stage.tied if shards else frozenset[str]()
    sizes: list[int] = []
    for number, chunk in enumerate(stage.chunks):
        has_size = has_sizes(options, is_first=stage.index == number == 0)
        sizes += padded(chunk.model, ranks, options, shards=shards, has_size=has_size, alone=alone)
    tied = [each.elements for each in stage.model.parameters if each.name in stage.tied]
    width = _reduced(strategy).size_bytes
    return [
        *_moved(stage.model, strategy, sizes),
        *all_reduces("embedding", tied, ranks=2, size_bytes=width),
    ]


def _moved(model: Model, strategy: Strategy, sizes: list[int]) -> list[WireBytes]:
    """Return what buckets of these sizes move, and gradients of copies over the tensor axis."""
    ranks = strategy.parallel.data
    shards = [size // ranks for size in sizes]
    wire = strategy.train.precision.compute.size_bytes
    reduced = _reduced(strategy).size_bytes
    sent = (ranks - 1) * sum(shards)
    cut = any(value.tensor_sharded for value in model.values.values())
    copies = sum(each.elements for each in model.parameters if cut and not each.tensor_sharded)
    summed = all_reduces("tensor", [copies], ranks=strategy.parallel.tensor, size_bytes=reduced)
    if strategy.zero.stage == 0:
        return [*summed, *all_reduces("data", sizes, ranks=ranks, size_bytes=reduced)]
    gathered = WireBytes(group="data", collective="all_gather", bytes=sent * wire)
    if strategy.options(Megatron).allreduce_in_float32:
        size_bytes = DType.FP32.size_bytes
        return [*summed, gathered, *all_reduces("data", sizes, ranks=ranks, size_bytes=size_bytes)]
    return [
        *summed,
        gathered,
        WireBytes(group="data", collective="reduce_scatter", bytes=sent * reduced),
        *all_reduces("replicate", shards, ranks=strategy.parallel.replicate, size_bytes=reduced),
    ]


def _reduced(strategy: Strategy) -> DType:
    """Return the format in which gradients are reduced."""
    in_fp32 = strategy.options(Megatron).grad_reduce_in_fp32
    return DType.FP32 if in_fp32 else strategy.train.precision.compute


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of adding each micro-batch's gradients to what collects them.

    None are copied where the products that make them add them.
    """
    if strategy.options(Megatron).gradient_accumulation_fusion:
        return CopiedBytes()
    compute = strategy.train.precision.compute.size_bytes
    wide = _reduced(strategy).size_bytes
    times = strategy.train.gradient_accumulation_steps
    elements = sum(each.elements for each in model.parameters)
    return CopiedBytes(compute=times * elements * (compute + 2 * wide))


def host(model: Model, strategy: Strategy) -> HostBytes:
    """Return what layers keep in host memory until their backward, which goes out and back."""
    moved = strategy.train.gradient_accumulation_steps * stored_bytes(model, strategy)
    return HostBytes(to_host=moved, from_host=moved)


VOLUME = DataVolume(data=data, of_stage=of_stage, copied=copied, host=host)
