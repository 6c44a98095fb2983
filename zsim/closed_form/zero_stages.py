"""Volume of parameters and gradients in zsim's own stages: a multiple of padded elements."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from weakref import finalize

from zsim.closed_form.checkpoint import goes_back, recomputed_with_block
from zsim.closed_form.data_volume import DataVolume, all_reduces, over_tokens
from zsim.model.model import Model
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy
from zsim.strategy.zero_knobs import Keep


@dataclass(frozen=True, slots=True)
class BucketSize:
    """Parameters that are gathered as one: their elements, without padding.

    Buckets that are not `frozen` are also reduced and updated. `again` is the number of reads
    after forward: by backward, and before it if their unit is recomputed separately. `first` is
    the place of the first of them among all parameters, in order of use.
    """

    elements: int
    frozen: bool
    again: int
    first: int

    def padded(self, ranks: int) -> int:
        """Return the elements, rounded up to a multiple of the ranks."""
        return -(-self.elements // ranks) * ranks


def padded_elements(model: Model, strategy: Strategy, *, frozen: bool) -> int:
    """Return the elements of all frozen or all trained buckets on one rank of the tensor axis."""
    ranks = strategy.parallel.data
    return sum(each.padded(ranks) for each in buckets(model, strategy) if each.frozen is frozen)


def buckets(model: Model, strategy: Strategy) -> tuple[BucketSize, ...]:
    """Return every bucket; frozen parameters have their own buckets.

    Buckets are filled from the last unit to the first. A bucket is closed when the next parameter
    would make it too large, and in stage 3 at the end of its unit. The first bucket of trained
    parameters may have its own limit. A unit that is called several times counts once. The result
    of the latest call is cached while the model is alive, since each volume needs it.
    """
    known = _LATEST.get(id(model))
    if known is None:
        finalize(model, _LATEST.pop, id(model), None).atexit = False
    if known is None or known[0] is not strategy:
        filled = (
            *_filled(model, strategy, frozen=False),
            *(_filled(model, strategy, frozen=True) if model.frozen else ()),
        )
        known = _LATEST[id(model)] = strategy, filled
    return known[1]


_LATEST: dict[int, tuple[Strategy, tuple[BucketSize, ...]]] = {}
"""Strategy and buckets of models that are alive, by `id`."""


def _filled(model: Model, strategy: Strategy, *, frozen: bool) -> Iterator[BucketSize]:
    limit = strategy.bucket_limit if frozen else strategy.first_bucket_limit
    apart, read = recomputed_with_block(model, strategy), set[str]()
    for unit in model.units:
        if goes_back(model, unit):
            read.add(unit.module or unit.name)
    units = [
        (
            [each for each in unit.parameters if each.frozen is frozen],
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
            yield BucketSize(parameter.elements, frozen, again, place)
    filled = first = times = 0
    holds = False
    for own, again in reversed(units):
        if strategy.zero.stage == 3 and holds:
            yield BucketSize(filled, frozen, times, first)
            holds = False
        for parameter in own:
            size, place = parameter.elements, places[parameter.name]
            if uses[parameter.name] > 1:
                continue
            if holds and limit is not None and filled + size > limit:
                yield BucketSize(filled, frozen, times, first)
                holds, limit = False, strategy.bucket_limit
            if holds:
                filled, first = filled + size, min(first, place)
            else:
                filled, first, times, holds = size, place, again, True
    if holds:
        yield BucketSize(filled, frozen, times, first)


def kept_back(model: Model, strategy: Strategy) -> int:
    """Return the elements, with padding, of the first buckets, which the device updates itself.

    These are as many buckets as fit in the device's share of all elements.
    """
    ranks, share = strategy.parallel.data, Fraction(str(strategy.offload.device_share))
    trained = sorted(
        (each for each in buckets(model, strategy) if not each.frozen), key=lambda each: each.first
    )
    sums = list(accumulate(each.padded(ranks) for each in trained))
    return max([0, *(each for each in sums if each <= share * sums[-1])])


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, its inner part, and the replicas."""
    ranks, micro_batches = strategy.parallel.data, strategy.train.gradient_accumulation_steps
    size = strategy.train.precision.compute.size_bytes
    once = padded_elements(model, strategy, frozen=False) // ranks * (ranks - 1) * size
    reductions = 1 if strategy.reduces_once else micro_batches
    tensor = strategy.parallel.tensor
    summed = over_tokens(model, times=micro_batches, ranks=tensor, size_bytes=size)
    if strategy.zero.stage == 0:
        return [
            *summed,
            WireBytes(group="data", collective="all_reduce", bytes=2 * once),
            *_replicas(model, strategy, ranks=1),
        ]
    gathered, inner = once, 0
    if strategy.zero.stage == 3:
        gathered, inner = _gathered(model, strategy)
    return [
        *summed,
        WireBytes(group="data", collective="all_gather", bytes=gathered),
        WireBytes(group="inner", collective="all_gather", bytes=inner),
        WireBytes(group="data", collective="reduce_scatter", bytes=reductions * once),
        *_replicas(model, strategy, ranks=ranks),
    ]


def _gathered(model: Model, strategy: Strategy) -> tuple[int, int]:
    """Return the bytes that stage 3 gathers over the data axis and over its inner part."""
    ranks, size = strategy.parallel.data, strategy.train.precision.compute.size_bytes
    found = inner = 0
    for each in buckets(model, strategy):
        whole, (times, again) = each.padded(ranks), gathers(each, strategy)
        neighbours = strategy.zero.secondary or 1
        inner += again * (whole // neighbours) * (neighbours - 1) * size
        found += times * (whole // ranks) * (ranks - 1) * size
    return found, inner


def gathers(bucket: BucketSize, strategy: Strategy) -> tuple[int, int]:
    """Return the number of gathers of a bucket in a step: over the data axis, its inner part."""
    keeps = strategy.zero.keep_after_forward is Keep.EVERYTHING
    times = strategy.train.gradient_accumulation_steps * (1 if keeps else 1 + bucket.again)
    return (times, 0) if strategy.zero.secondary is None else (1, times - 1)


def _replicas(model: Model, strategy: Strategy, *, ranks: int) -> list[WireBytes]:
    """Return the all-reduces over replicas, once a step, of each rank's part of every bucket."""
    parts = [
        each.padded(strategy.parallel.data) // ranks
        for each in buckets(model, strategy)
        if not each.frozen
    ]
    size_bytes = strategy.train.precision.compute.size_bytes
    return all_reduces("replicate", parts, ranks=strategy.parallel.replicate, size_bytes=size_bytes)


VOLUME = DataVolume(data=data)
