"""Parameters and gradients of zsim's own stages: f x padded elements, so many times."""

from collections import Counter

from zsim.closed_form.ring import all_reduces
from zsim.closed_form.volume import DataVolume
from zsim.model import Model
from zsim.schedule import WireBytes
from zsim.strategy import Keep, Strategy


def padded_elements(model: Model, strategy: Strategy) -> int:
    """Elements of all buckets on one rank of the tensor axis, padding included."""
    ranks = strategy.data
    return sum(ranks * -(-size // ranks) for size in bucket_elements(model, strategy))


def bucket_elements(model: Model, strategy: Strategy) -> list[int]:
    """Elements of each bucket without padding.

    Parameters are taken from the last unit to the first; a bucket is closed when the next parameter
    would make it too large, and in stage 3 at the end of its unit. A unit that is called again is
    taken once.
    """
    limit = strategy.bucket_limit
    uses = Counter(parameter.name for unit in model.modules for parameter in unit.parameters)
    shared = {parameter.name: parameter.elements for parameter in model.parameters}
    sizes = [shared[name] for name, count in uses.items() if count > 1]
    filled: int | None = None
    for unit in reversed(model.modules):
        if strategy.stage == 3 and filled is not None:
            sizes.append(filled)
            filled = None
        for parameter in unit.parameters:
            if uses[parameter.name] > 1:
                continue
            if filled is not None and limit is not None and filled + parameter.elements > limit:
                sizes.append(filled)
                filled = None
            filled = (filled or 0) + parameter.elements
    return sizes if filled is None else [*sizes, filled]


def data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume over the data axis, its inner part, and the replicas."""
    ranks, micro_batches = strategy.data, strategy.gradient_accumulation_steps
    size = strategy.precision.compute.size_bytes
    whole = padded_elements(model, strategy)
    once = whole // ranks * (ranks - 1) * size
    reductions = 1 if strategy.reduces_once else micro_batches
    if strategy.stage == 0:
        return [
            WireBytes(group="data", collective="all_reduce", bytes=2 * once),
            *_replicas(model, strategy, ranks=1),
        ]
    gathers, inner = 1, 0
    if strategy.stage == 3:
        gathers = micro_batches * (1 if strategy.keep_after_forward is Keep.EVERYTHING else 2)
    if strategy.secondary is not None:
        gathers, inner = 1, gathers - 1
    neighbours = strategy.secondary or 1
    return [
        WireBytes(group="data", collective="all_gather", bytes=gathers * once),
        WireBytes(
            group="inner",
            collective="all_gather",
            bytes=inner * (whole // neighbours) * (neighbours - 1) * size,
        ),
        WireBytes(group="data", collective="reduce_scatter", bytes=reductions * once),
        *_replicas(model, strategy, ranks=ranks),
    ]


def _replicas(model: Model, strategy: Strategy, *, ranks: int) -> list[WireBytes]:
    """All-reduces over the replicas, once a step, of what each of `ranks` owns of every bucket."""
    parts = [
        -(-size // strategy.data) * strategy.data // ranks
        for size in bucket_elements(model, strategy)
    ]
    size_bytes = strategy.precision.compute.size_bytes
    return all_reduces("replicate", parts, ranks=strategy.replicate, size_bytes=size_bytes)


VOLUME = DataVolume(data=data)
