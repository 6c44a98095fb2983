"""Parameters and gradients in nanotron: once a step, gradients in fp32, buckets padded to ranks.

Parameters that several units use are a bucket each; the others are in the reverse order of the
model, closed before they would hold more than `ddp_bucket_cap_mb`. With hidden states cut by tokens
those that are not cut are one bucket, which is summed over the tensor axis first.
"""

from collections import Counter

from zsim.closed_form.data_volume import DataVolume
from zsim.closed_form.ring import all_reduces
from zsim.dtype import DType
from zsim.model.model import Model
from zsim.runtimes.nanotron.options import Nanotron
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy

FP32 = DType.FP32.size_bytes


def padded(model: Model, strategy: Strategy, options: Nanotron) -> tuple[list[int], int]:
    """Elements of each bucket with padding, and of that of copies, which is one of them."""
    uses = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    limit = options.ddp_bucket_cap_mb * 2**20 // strategy.precision.compute.size_bytes
    cut = any(value.tensor_sharded for value in model.values.values())
    sizes: list[int] = []
    copies = filled = 0
    for parameter in reversed(model.parameters):
        if cut and not parameter.tensor_sharded:
            copies += parameter.elements
        elif uses[parameter.name] > 1:
            sizes.append(parameter.elements)
        elif filled and filled + parameter.elements > limit:
            sizes.append(filled)
            filled = parameter.elements
        else:
            filled += parameter.elements
    ranks = strategy.data
    return [-(-size // ranks) * ranks for size in (*sizes, filled, copies) if size], -(
        -copies // ranks
    ) * ranks


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis, and of copies over the tensor axis."""
    options = strategy.options(Nanotron)
    ranks = strategy.data
    sizes, copies = padded(model, strategy, options)
    found = all_reduces("tensor", [copies], ranks=strategy.tensor, size_bytes=FP32)
    if strategy.stage == 0:
        return [*found, *all_reduces("data", sizes, ranks=ranks, size_bytes=FP32)]
    sent = (ranks - 1) * sum(size // ranks for size in sizes)
    wire = strategy.precision.compute.size_bytes
    return [
        *found,
        WireBytes(group="data", collective="all_gather", bytes=sent * wire),
        WireBytes(group="data", collective="reduce_scatter", bytes=sent * FP32),
    ]


VOLUME = DataVolume(data=data)
