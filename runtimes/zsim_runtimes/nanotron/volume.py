"""Parameters and gradients in nanotron: once a step, gradients in fp32, buckets padded to ranks.

Parameters that several units use are a bucket each. Of the others, in the reverse order of the
model, a bucket is closed before it would hold more than `ddp_bucket_cap_mb`; with ZeRO-1 they are
one. With hidden states cut by tokens those that are not cut are one bucket, which is summed over
the tensor axis too.
"""

from zsim.closed_form.data_volume import (
    CopiedBytes,
    DataVolume,
    all_reduces,
    closed_before,
    use_counts,
)
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy
from zsim_runtimes.nanotron.options import Nanotron

FP32 = DType.FP32.size_bytes


def padded(model: Model, strategy: Strategy, options: Nanotron) -> tuple[list[int], int]:
    """Return elements of each bucket with padding, and of that of copies, which is one of them."""
    uses = use_counts(model)
    limit = options.ddp_bucket_cap_mb * 2**20 // strategy.train.precision.compute.size_bytes
    summed = model.summed_copies
    copies = sum(each.elements for each in model.parameters if each.name in summed)
    own = [each for each in reversed(model.parameters) if each.name not in summed]
    sizes = [each.elements for each in own if uses[each.name] > 1]
    once = [each.elements for each in own if uses[each.name] == 1]
    sizes += [sum(once)] if strategy.zero.stage else closed_before(once, limit)
    ranks = strategy.parallel.data
    *found, last = (-(-size // ranks) * ranks for size in (*sizes, copies))
    return [size for size in (*found, last) if size], last


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume over the data axis, and of copies over the tensor axis."""
    options = strategy.options(Nanotron)
    ranks = strategy.parallel.data
    sizes, copies = padded(model, strategy, options)
    found = all_reduces("tensor", [copies], ranks=strategy.parallel.tensor, size_bytes=FP32)
    found += all_reduces("data", sizes, ranks=ranks, size_bytes=FP32)
    if strategy.zero.stage == 0:
        return found
    sent = (ranks - 1) * sum(size // ranks for size in sizes)
    wire = strategy.train.precision.compute.size_bytes
    return [*found, WireBytes(group="data", collective="all_gather", bytes=sent * wire)]


def copied(model: Model, strategy: Strategy) -> CopiedBytes:
    """Return the bytes of adding each micro-batch's gradients to those in fp32."""
    each = strategy.train.precision.compute.size_bytes + 2 * FP32
    times = strategy.train.gradient_accumulation_steps
    return CopiedBytes(compute=times * sum(one.elements for one in model.parameters) * each)


VOLUME = DataVolume(data=data, copied=copied)
