"""Data volumes of Megatron-LM: once a step, in padded buckets.

Parameters are in the reverse order of the model, each at a multiple of 64 elements. A bucket is
closed once it is large enough, at a multiple of the ranks and of 128. With sequence parallelism,
gradients of replicated parameters are summed over the tensor axis in one all-reduce. In a pipeline,
each chunk of a stage has separate buckets; only buckets of the first have a size limit. A tied
embedding is a separate bucket, whose gradients are summed over the first and the last stage as
well. Without the distributed optimizer (stage 0), there are no gaps, and a tied embedding has no
separate bucket.

In a separate rank order, buckets of experts follow all others, over ranks with the same experts.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from math import lcm

from zsim.closed_form.by_model import kept_by_model
from zsim.closed_form.data_volume import CopiedBytes, DataVolume, all_reduces
from zsim.closed_form.stored_layers import stored_bytes
from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.model.pipeline_stages import Stage
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.execution import NarrowWeights
from zsim.strategy.strategy import Strategy
from zsim_runtimes.megatron.options import Megatron


@dataclass(frozen=True, slots=True)
class Sizes:
    """Elements of buckets with gaps and padding, and the group and ranks that share each.

    An element is gathered in `wire` bytes.
    """

    group: str
    ranks: int
    wire: int
    elements: list[int]

    @property
    def shards(self) -> list[int]:
        """Elements of a rank's shard of each bucket."""
        return [size // self.ranks for size in self.elements]

    @property
    def sent(self) -> int:
        """Elements that a rank sends to gather or to scatter all buckets around a ring."""
        return (self.ranks - 1) * sum(self.shards)


def sizes_of(
    model: Model,
    strategy: Strategy,
    *,
    has_size: bool = True,
    alone: Set[str] = frozenset(),
) -> list[Sizes]:
    """Return the buckets of dense layers, and of experts in a separate rank order."""
    limit = 0
    if has_size:
        limit = strategy.options(Megatron).bucket_elements(data=strategy.parallel.data) or 0
    shards, kinds = strategy.zero.stage == 1, _kinds(strategy)
    owners = [("data", False, strategy.parallel.data)]
    if apart := strategy.has_expert_order:
        owners.append(("expert_data", True, strategy.expert_data))

    def compute() -> list[Sizes]:
        found: list[Sizes] = []
        for group, expert, ranks in owners:
            own = [each for each in reversed(model.parameters) if (apart and each.expert) is expert]
            for float8, wire in kinds:
                of_kind = [each for each in own if float8 in (None, each.float8)]
                if of_kind or not (apart or float8 is not None):
                    sizes = padded(of_kind, ranks, limit, shards=shards, alone=alone)
                    found.append(Sizes(group, ranks, wire, sizes))
        return found

    key = "buckets", tuple(owners), kinds, limit, shards, frozenset(alone)
    return kept_by_model(model, key, compute)


def _kinds(strategy: Strategy) -> tuple[tuple[bool | None, int], ...]:
    """Return kinds of buffers: a flag `float8` (None is all parameters), and bytes on the wire."""
    wide = strategy.train.precision.compute.size_bytes
    match strategy.narrow_weights:
        case NarrowWeights.CAST:
            return ((None, wide),)
        case NarrowWeights.CAST_FROM_SHARDS:
            return ((True, wide), (False, wide))
        case NarrowWeights.KEPT:
            return ((True, DType.FP8.size_bytes), (False, wide))


def padded(
    parameters: Sequence[Parameter],
    ranks: int,
    limit: int,
    *,
    shards: bool,
    alone: Set[str] = frozenset(),
) -> list[int]:
    """Return elements of each bucket with gaps and padding; some parameters are `alone`."""
    start, end = (64, 128) if shards else (1, 1)
    multiple = lcm(ranks, end)
    sizes: list[int] = []
    filled = 0
    for parameter in parameters:
        if filled and (parameter.name in alone or (limit and filled >= limit)):
            sizes.append(filled)
            filled = 0
        filled = -(-filled // start) * start + parameter.elements
        if parameter.name in alone:
            sizes.append(filled)
            filled = 0
    return [-(-size // multiple) * multiple for size in (*sizes, filled)]


def has_sizes(options: Megatron, *, is_first: bool) -> bool:
    """Return True if buckets of a chunk have a size limit: the first chunk's, or summed in fp32."""
    return is_first or options.allreduce_in_float32


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, and over the replicas of the sharded states."""
    return _moved(model, strategy, sizes_of(model, strategy))


def of_stage(stage: Stage, strategy: Strategy) -> list[WireBytes]:
    """Return the same volume for a pipeline stage, with sums of tied embeddings."""
    options = strategy.options(Megatron)
    alone = stage.tied if strategy.zero.stage == 1 else frozenset[str]()
    sizes: list[Sizes] = []
    for number, chunk in enumerate(stage.chunks):
        has_size = has_sizes(options, is_first=stage.index == number == 0)
        sizes += sizes_of(chunk.model, strategy, has_size=has_size, alone=alone)
    tied = [each.elements for each in stage.model.parameters if each.name in stage.tied]
    width = _reduced(strategy).size_bytes
    return [
        *_moved(stage.model, strategy, sizes),
        *all_reduces("embedding", tied, ranks=2, size_bytes=width),
    ]


def _moved(model: Model, strategy: Strategy, sizes: list[Sizes]) -> list[WireBytes]:
    """Return the volume of buckets of these sizes, and of replicated parameters' gradients."""
    reduced = _reduced(strategy).size_bytes
    copies = kept_by_model(model, "summed copies", lambda: _summed_copies(model))
    summed = all_reduces("tensor", [copies], ranks=strategy.parallel.tensor, size_bytes=reduced)
    return [*summed, *(line for each in sizes for line in _reduced_over(each, strategy))]


def _reduced_over(sizes: Sizes, strategy: Strategy) -> Iterator[WireBytes]:
    """Yield the volume of buckets over the group that shards them, and over the replicas."""
    reduced = _reduced(strategy).size_bytes
    group, ranks, elements = sizes.group, sizes.ranks, sizes.elements
    if strategy.zero.stage == 0:
        yield from all_reduces(group, elements, ranks=ranks, size_bytes=reduced)
        return
    yield WireBytes(group=group, collective="all_gather", bytes=sizes.sent * sizes.wire)
    if strategy.options(Megatron).allreduce_in_float32:
        size_bytes = DType.FP32.size_bytes
        yield from all_reduces(group, elements, ranks=ranks, size_bytes=size_bytes)
        return
    yield WireBytes(group=group, collective="reduce_scatter", bytes=sizes.sent * reduced)
    replicas = strategy.parallel.replicate
    yield from all_reduces("replicate", sizes.shards, ranks=replicas, size_bytes=reduced)


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
