"""Parameters and gradients in DeepSpeed's stages 1 and 2: a gather a step, and all-reduced buckets.

The flat tensor of all parameters that are trained is padded to a multiple of twice the ranks.
Gradients are all-reduced whole, in the order in which backward completes them, at most
`reduce_bucket_size` elements at a time: once a step in stage 1, in every micro-batch in stage 2.
"""

from zsim.closed_form.ring import all_reduces
from zsim.closed_form.volume import DataVolume
from zsim.model import Model
from zsim.runtime.deepspeed import DeepSpeed
from zsim.schedule import WireBytes
from zsim.strategy import Strategy


def padded_elements(model: Model, ranks: int) -> int:
    """Elements of the flat tensor."""
    elements = sum(parameter.elements for parameter in model.parameters if not parameter.frozen)
    return -(-elements // (2 * ranks)) * 2 * ranks


def completed(model: Model) -> list[int]:
    """Elements of each trained parameter in the order in which backward completes its gradient."""
    order: dict[str, int] = {}
    for unit in reversed(model.units):
        for parameter in reversed(unit.parameters):
            order.pop(parameter.name, None)  # another unit adds to it
            if not parameter.frozen:
                order[parameter.name] = parameter.elements
    return list(order.values())


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis."""
    options = strategy.options(DeepSpeed)
    ranks = strategy.data
    sizes = completed(model)
    if strategy.stage == 1 and not options.overlap_comm:
        trained = [parameter for parameter in model.parameters if not parameter.frozen]
        sizes = [parameter.elements for parameter in reversed(trained)]
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        if filled and filled + size > options.reduce_bucket_size:
            buckets.append(filled)
            filled = 0
        if size > options.reduce_bucket_size:
            buckets.append(size)
        else:
            filled += size
    compute = strategy.precision.compute
    wire = (options.communication_data_type or compute).size_bytes
    times = strategy.gradient_accumulation_steps if strategy.stage == 2 else 1
    gathered = padded_elements(model, ranks) // ranks * (ranks - 1) * compute.size_bytes
    return [
        WireBytes(group="data", collective="all_gather", bytes=gathered),
        *all_reduces("data", [*buckets, filled] * times, ranks=ranks, size_bytes=wire),
    ]


VOLUME = DataVolume(data=data, norms=lambda model, strategy: 1)
