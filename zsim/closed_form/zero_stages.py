"""Volume of parameters and gradients in zsim's own stages: a multiple of padded elements."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import accumulate, product
from weakref import finalize

from zsim.closed_form.checkpoint import goes_back, recomputed_with_block
from zsim.closed_form.data_volume import DataVolume, all_reduces, over_tokens
from zsim.model.model import Model, Parameter
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy
from zsim.strategy.zero_knobs import Keep


@dataclass(frozen=True, slots=True)
class BucketSize:
    """Parameters that are gathered as one: their elements, without padding.

    Buckets that are not `frozen` are also reduced and updated. `again` is the number of reads
    after forward: by backward, and before it if their unit is recomputed separately. `first` is
    the place of the first of them among all parameters, in order of use. Buckets of an `expert`
    are sharded over the ranks with the same experts, others over the data axis.
    """

    elements: int
    frozen: bool
    again: int
    first: int
    expert: bool = False

    def ranks(self, strategy: Strategy) -> int:
        """Return the ranks over which it is sharded."""
        return strategy.expert_data if self.expert else strategy.parallel.data

    def padded(self, strategy: Strategy) -> int:
        """Return the elements, rounded up to a multiple of the ranks."""
        return self.shard(strategy) * self.ranks(strategy)

    def shard(self, strategy: Strategy) -> int:
        """Return the elements of one rank's shard."""
        return -(-self.elements // self.ranks(strategy))


def padded_elements(model: Model, strategy: Strategy, *, frozen: bool) -> int:
    """Return the elements of all frozen or all trained buckets on one rank of the tensor axis."""
    return sum(each.padded(strategy) for each in buckets(model, strategy) if each.frozen is frozen)


def sharded_elements(model: Model, strategy: Strategy, *, frozen: bool) -> int:
    """Return the elements of a rank's shards of all frozen or all trained buckets."""
    return sum(each.shard(strategy) for each in buckets(model, strategy) if each.frozen is frozen)


def buckets(model: Model, strategy: Strategy) -> tuple[BucketSize, ...]:
    """Return every bucket; frozen parameters and parameters of experts have separate buckets.

    Buckets are filled from the last unit to the first. A bucket is closed when the next parameter
    would make it too large, and in stage 3 at the end of its unit. The first bucket of trained
    parameters may have its own limit. A unit that is called several times counts once. The result
    of the latest call is cached while the model is alive, since each volume needs it.
    """
    known = _LATEST.get(id(model))
    if known is None:
        finalize(model, _LATEST.pop, id(model), None).atexit = False
    if known is None or known[0] is not strategy:
        kinds = product((False, True), (False, True) if strategy.has_expert_order else (False,))
        filled = tuple(
            bucket
            for frozen, expert in kinds
            if model.frozen or not frozen
            for bucket in _filled(model, strategy, frozen=frozen, expert=expert)
        )
        known = _LATEST[id(model)] = strategy, filled
    return known[1]


_LATEST: dict[int, tuple[Strategy, tuple[BucketSize, ...]]] = {}
"""Strategy and buckets of models that are alive, by `id`."""


def _filled(
    model: Model, strategy: Strategy, *, frozen: bool, expert: bool
) -> Iterator[BucketSize]:
    limit = strategy.bucket_limit if frozen or expert else strategy.first_bucket_limit
    is_own = partial(_is_of, frozen=frozen, expert=expert, apart=strategy.has_expert_order)
    apart, read = recomputed_with_block(model, strategy), set[str]()
    for unit in model.units:
        if goes_back(model, unit):
            read.add(unit.module or unit.name)
    units = [
        (
            [each for each in unit.parameters if is_own(each)],
            (unit.name in read) + (unit.name in apart),
        )
        for unit in model.modules
    ]
    uses = Counter(parameter.name for own, _ in units for parameter in own)
    reread = {parameter.name: again for own, again in units if again for parameter in own}
    places = {parameter.name: place for place, parameter in enumerate(model.parameters)}
    for parameter in model.parameters:
        if uses[parameter.name] > 1:
            again, place = reread.get(parameter.name, 0), places[parameter.name]
            yield BucketSize(parameter.elements, frozen, again, place, expert)
    filled = first = times = 0
    holds = False
    for own, again in reversed(units):
        if strategy.zero.stage == 3 and holds:
            yield BucketSize(filled, frozen, times, first, expert)
            holds = False
        for parameter in own:
            size, place = parameter.elements, places[parameter.name]
            if uses[parameter.name] > 1:
                continue
            if holds and limit is not None and filled + size > limit:
                yield BucketSize(filled, frozen, times, first, expert)
                holds, limit = False, strategy.bucket_limit
            if holds:
                filled, first = filled + size, min(first, place)
            else:
                filled, first, times, holds = size, place, again, True
    if holds:
        yield BucketSize(filled, frozen, times, first, expert)


def _is_of(parameter: Parameter, *, frozen: bool, expert: bool, apart: bool) -> bool:
    """Return True if a parameter is in buckets of a kind; experts are in others if `apart`."""
    return parameter.frozen is frozen and (parameter.expert and apart) is expert


def kept_back(model: Model, strategy: Strategy) -> int:
    """Return the elements, with padding, of the first buckets, which the device updates itself.

    These are as many buckets as fit in the device's share of all elements.
    """
    share = Fraction(str(strategy.offload.device_share))
    trained = sorted(
        (each for each in buckets(model, strategy) if not each.frozen), key=lambda each: each.first
    )
    sums = list(accumulate(each.padded(strategy) for each in trained))
    return max([0, *(each for each in sums if each <= share * sums[-1])])


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, its inner part, ranks of experts, and the replicas."""
    micro_batches = strategy.train.gradient_accumulation_steps
    size = strategy.train.precision.compute.size_bytes
    tensor = strategy.parallel.tensor
    found = over_tokens(model, times=micro_batches, ranks=tensor, size_bytes=size)
    every = list(buckets(model, strategy))
    for group, expert in (("data", False), ("expert_data", True)):
        found += _over(group, [each for each in every if each.expert is expert], strategy)
    return [*found, *_replicas(model, strategy)]


def _over(group: str, own: Sequence[BucketSize], strategy: Strategy) -> list[WireBytes]:
    """Return the volume of buckets over the group that shards them, and its inner part."""
    size = strategy.reduction_format.size_bytes
    once = sum(_sent(each, strategy) for each in own if not each.frozen) * size
    if strategy.zero.stage == 0:
        return [WireBytes(group=group, collective="all_reduce", bytes=2 * once)]
    gathered, inner = once, 0
    if strategy.zero.stage == 3:
        gathered, inner = _gathered(own, strategy)
    reductions = 1 if strategy.reduces_once else strategy.train.gradient_accumulation_steps
    return [
        WireBytes(group=group, collective="all_gather", bytes=gathered),
        WireBytes(group="inner", collective="all_gather", bytes=inner),
        WireBytes(group=group, collective="reduce_scatter", bytes=reductions * once),
    ]


def _sent(bucket: BucketSize, strategy: Strategy) -> int:
    """Return the elements that a rank sends to gather or to scatter a bucket around a ring."""
    return bucket.shard(strategy) * (bucket.ranks(strategy) - 1)


def _gathered(own: Sequence[BucketSize], strategy: Strategy) -> tuple[int, int]:
    """Return the bytes that stage 3 gathers over all ranks of a group and over its inner part."""
    size = strategy.train.precision.compute.size_bytes
    found = inner = 0
    for each in own:
        whole, (times, again) = each.padded(strategy), gathers(each, strategy)
        neighbours = strategy.zero.secondary or 1
        inner += again * (whole // neighbours) * (neighbours - 1) * size
        found += times * _sent(each, strategy) * size
    return found, inner


def gathers(bucket: BucketSize, strategy: Strategy) -> tuple[int, int]:
    """Return the number of gathers of a bucket in a step: over the data axis, its inner part."""
    keeps = strategy.zero.keep_after_forward is Keep.EVERYTHING
    times = strategy.train.gradient_accumulation_steps * (1 if keeps else 1 + bucket.again)
    return (times, 0) if strategy.zero.secondary is None else (1, times - 1)


def _replicas(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the all-reduces over replicas, once a step, of each rank's part of every bucket."""
    parts = [
        each.shard(strategy) if strategy.zero.stage else each.padded(strategy)
        for each in buckets(model, strategy)
        if not each.frozen
    ]
    size_bytes = strategy.train.precision.compute.size_bytes
    return all_reduces("replicate", parts, ranks=strategy.parallel.replicate, size_bytes=size_bytes)


VOLUME = DataVolume(data=data)
