"""Data volumes of Megatron-LM: once a step, in padded buckets.

Parameters are in the reverse order of the model, each at a multiple of 64 elements. A bucket is
closed once it is large enough, at a multiple of the ranks and of 128. With sequence parallelism,
gradients of replicated parameters are summed over the tensor axis in one all-reduce. In a pipeline,
each chunk of a stage has separate buckets; only those of the first have a size limit. A tied
embedding is a separate bucket, whose gradients are summed over the first and the last stage as
well. Without the distributed optimizer (stage 0), there are no gaps, and a tied embedding has no
separate bucket.
"""

from collections.abc import Mapping
from math import lcm
from typing import Protocol

from zsim.closed_form.by_model import kept_by_model
from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces
from zsim.closed_form.stored_layers import stored_bytes
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.model.pipeline_stages import Stage
from zsim.runtimes.megatron.options import Megatron
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.execution import NarrowWeights
from zsim.strategy.strategy import Strategy


def padded(
    model: Model,
    ranks: int,
    options: Megatron,
    *,
    shards: bool,
    has_size: bool = True,
    alone: frozenset[str] = frozenset(),
    float8: bool | None = None,
) -> list[int]:
    """Return elements of each bucket with gaps and padding; some parameters are `alone`.

    With `float8`, of parameters with that flag alone.
    """
    limit = (has_size and options.bucket_elements(data=ranks)) or 0
    key = "buckets", ranks, shards, limit, alone, float8

    def compute() -> list[int]:
        return _padded(model, ranks, limit, shards=shards, alone=alone, float8=float8)

    return kept_by_model(model, key, compute)


def _padded(
    model: Model,
    ranks: int,
    limit: int,
    *,
    shards: bool,
    alone: frozenset[str],
    float8: bool | None,
) -> list[int]:
    start, end = (64, 128) if shards else (1, 1)
    multiple = lcm(ranks, end)
    sizes: list[int] = []
    filled = 0
    for parameter in reversed(model.parameters):
        if float8 is not None and parameter.float8 is not float8:
            continue
        if filled and (parameter.name in alone or (limit and filled >= limit)):
            sizes.append(filled)
            filled = 0
        filled = -(-filled // start) * start + parameter.elements
        if parameter.name in alone:
            sizes.append(filled)
            filled = 0
    return [-(-size // multiple) * multiple for size in (*sizes, filled)]


class PaddedOf(Protocol):
    """Returns the sizes of buckets of parameters with a flag `float8`, or of all."""

    def __call__(self, *, float8: bool | None) -> list[int]:
        """Return them."""
        ...


def by_bytes(sizes: PaddedOf, strategy: Strategy) -> dict[int, list[int]]:
    """Return sizes of buckets by the bytes in which an element is gathered."""
    wide = strategy.train.precision.compute.size_bytes
    match strategy.narrow_weights:
        case NarrowWeights.CAST:
            return {wide: sizes(float8=None)}
        case NarrowWeights.CAST_FROM_SHARDS:
            return {wide: [*sizes(float8=True), *sizes(float8=False)]}
        case NarrowWeights.KEPT:
            return {DType.FP8.size_bytes: sizes(float8=True), wide: sizes(float8=False)}


def has_sizes(options: Megatron, *, is_first: bool) -> bool:
    """Return True if buckets of a chunk have a size limit: the first chunk's, or summed in fp32."""
    return is_first or options.allreduce_in_float32


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, and over the replicas of the sharded states."""
    options = strategy.options(Megatron)
    ranks, shards = strategy.parallel.data, strategy.zero.stage == 1

    def sizes(*, float8: bool | None) -> list[int]:
        return padded(model, ranks, options, shards=shards, float8=float8)

    return _moved(model, strategy, by_bytes(sizes, strategy))


def of_stage(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Return the same volume for a pipeline stage, with sums of tied embeddings."""
    options, ranks = strategy.options(Megatron), strategy.parallel.data
    shards = strategy.zero.stage == 1
    alone = stage.tied if shards else frozenset[str]()

    def sizes(*, float8: bool | None) -> list[int]:
        return [
            size
            for number, chunk in enumerate(stage.chunks)
            for size in padded(
                chunk.model,
                ranks,
                options,
                shards=shards,
                has_size=has_sizes(options, is_first=stage.index == number == 0),
                alone=alone,
                float8=float8,
            )
        ]

    tied = [each.elements for each in stage.model.parameters if each.name in stage.tied]
    width = _reduced(strategy).size_bytes
    return [
        *_moved(stage.model, strategy, by_bytes(sizes, strategy)),
        *all_reduces("embedding", tied, ranks=2, size_bytes=width),
    ]


def _moved(model: Model, strategy: Strategy, padded_by: Mapping[int, list[int]]) -> list[WireBytes]:
    """Return the volume of buckets of these sizes, and of replicated parameters' gradients."""
    ranks = strategy.parallel.data
    sizes = [size for own in padded_by.values() for size in own]
    shards = [size // ranks for size in sizes]
    at_once = sum(wire * size // ranks for wire, own in padded_by.items() for size in own)
    reduced = _reduced(strategy).size_bytes
    sent = (ranks - 1) * sum(shards)
    copies = kept_by_model(model, "summed copies", lambda: _summed_copies(model))
    summed = all_reduces("tensor", [copies], ranks=strategy.parallel.tensor, size_bytes=reduced)
    if strategy.zero.stage == 0:
        return [*summed, *all_reduces("data", sizes, ranks=ranks, size_bytes=reduced)]
    moved = (ranks - 1) * at_once
    gathered = WireBytes(group="data", collective="all_gather", bytes=moved)
    if strategy.options(Megatron).allreduce_in_float32:
        size_bytes = DType.FP32.size_bytes
        return [*summed, gathered, *all_reduces("data", sizes, ranks=ranks, size_bytes=size_bytes)]
    return [
        *summed,
        gathered,
        WireBytes(group="data", collective="reduce_scatter", bytes=sent * reduced),
        *all_reduces("replicate", shards, ranks=strategy.parallel.replicate, size_bytes=reduced),
    ]


def _summed_copies(model: Model) -> int:
    """Return the elements of replicated parameters whose gradients are summed."""
    partial = model.summed_copies
    return sum(each.elements for each in model.parameters if each.name in partial)


def _reduced(strategy: Strategy) -> DType:
    """Return the dtype in which gradients are reduced."""
    in_fp32 = strategy.options(Megatron).grad_reduce_in_fp32
    return DType.FP32 if in_fp32 else strategy.train.precision.compute


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of adding each micro-batch's gradients to the accumulated ones.

    Nothing is copied if GEMMs add them.
    """
    if strategy.options(Megatron).gradient_accumulation_fusion:
        return CopiedBytes()
    compute = strategy.train.precision.compute.size_bytes
    wide = _reduced(strategy).size_bytes
    times = strategy.train.gradient_accumulation_steps
    elements = sum(each.elements for each in model.parameters)
    return CopiedBytes(compute=times * elements * (compute + 2 * wide))


def host(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes of activations that are copied to host memory and back."""
    moved = strategy.train.gradient_accumulation_steps * stored_bytes(model, strategy)
    return HostBytes(to_host=moved, from_host=moved)


VOLUME = DataVolume(data=data, of_stage=of_stage, copied=copied, host=host)
