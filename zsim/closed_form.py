"""What a step must move, from model and strategy alone: the second opinion on every schedule.

Written without the scheduler, which it may not import. Volumes are ring-equivalent bytes that one
rank sends in a step, exact integers (Rajbhandari et al. 2020, section 7, extended by micro-batches,
formats and padding).
"""

from collections import Counter

from zsim.model import BATCH, Model, Unit
from zsim.schedule import WireBytes
from zsim.strategy import Checkpointing, Keep, Precision, Strategy


def padded_elements(model: Model, strategy: Strategy) -> int:
    """Elements of all buckets on one rank of the tensor axis, padding included."""
    ranks = strategy.data
    return sum(ranks * -(-size // ranks) for size in bucket_elements(model, strategy))


def bucket_elements(model: Model, strategy: Strategy) -> list[int]:
    """Elements of each bucket without padding.

    Parameters are taken from the last unit to the first; a bucket is closed when the next parameter
    would make it too large, and in stage 3 at the end of its unit.
    """
    uses = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    shared = {parameter.name: parameter.elements for parameter in model.parameters}
    sizes = [shared[name] for name, count in uses.items() if count > 1]
    filled: int | None = None
    for unit in reversed(model.units):
        if strategy.stage == 3 and filled is not None:
            sizes.append(filled)
            filled = None
        for parameter in unit.parameters:
            if uses[parameter.name] > 1:
                continue
            if filled is not None and filled + parameter.elements > strategy.bucket_elements:
                sizes.append(filled)
                filled = None
            filled = (filled or 0) + parameter.elements
    return sizes if filled is None else [*sizes, filled]


def wire_bytes(model: Model, strategy: Strategy) -> tuple[WireBytes, ...]:
    """Volume of a step by group and collective, sorted; what is zero is left out."""
    found = [*_data(model, strategy), *_tensor(model, strategy), *_scalars(strategy)]
    return tuple(
        sorted(
            (volume for volume in found if volume.bytes),
            key=lambda volume: (volume.group, volume.collective, volume.scalar),
        )
    )


def _data(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Parameters and gradients over the data axis: f x padded elements, so many times."""
    ranks, micro_batches = strategy.data, strategy.gradient_accumulation_steps
    once = padded_elements(model, strategy) // ranks * (ranks - 1)
    once *= strategy.precision.compute.size_bytes
    reductions = 1 if strategy.reduces_once else micro_batches
    if strategy.stage == 0:
        return [WireBytes(group="data", collective="all_reduce", bytes=2 * once)]
    gathers = 1
    if strategy.stage == 3:
        gathers = micro_batches * (1 if strategy.keep_after_forward is Keep.EVERYTHING else 2)
    return [
        WireBytes(group="data", collective="all_gather", bytes=gathers * once),
        WireBytes(group="data", collective="reduce_scatter", bytes=reductions * once),
    ]


def _tensor(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Summands inside units, and partitioned checkpoints, over the tensor axis."""
    reduced = sum(
        _unit_all_reduce(model, unit, recomputed=_recomputed(unit, strategy))
        for unit in model.units
    )
    gathered = 0
    if strategy.partition_checkpoints and strategy.tensor > 1:
        gathered = sum(
            model.values[name].size_bytes // strategy.tensor * (strategy.tensor - 1)
            for unit in model.units
            if _recomputed(unit, strategy)
            for name in _given(unit)
        )
    micro_batches = strategy.gradient_accumulation_steps
    return [
        WireBytes(group="tensor", collective="all_reduce", bytes=micro_batches * reduced),
        WireBytes(group="tensor", collective="all_gather", bytes=micro_batches * gathered),
    ]


def _recomputed(unit: Unit, strategy: Strategy) -> bool:
    return unit.checkpoint and strategy.checkpointing is Checkpointing.FULL


def _given(unit: Unit) -> set[str]:
    own = {value.name for segment in unit.segments for value in segment.outputs}
    return {name for segment in unit.segments for name in segment.inputs} - own - {BATCH}


def _unit_all_reduce(model: Model, unit: Unit, *, recomputed: bool) -> int:
    """Bytes that a rank sends in the unit's all-reduces for one micro-batch."""
    total = 0
    for segment in unit.segments:
        if segment.reduces_output:
            runs = 2 if recomputed else 1
            total += runs * sum(_ring(model, value.name) for value in segment.outputs)
        if segment.reduces_input_gradient:
            total += sum(
                _ring(model, name)
                for name in segment.inputs
                if model.values[name].requires_gradient
            )
    return total


def _ring(model: Model, value: str) -> int:
    """Bytes that a rank sends when `value` is all-reduced over the tensor axis."""
    whole = model.values[value]
    return 2 * (model.tensor - 1) * -(-whole.elements // model.tensor) * whole.dtype.size_bytes


def _scalars(strategy: Strategy) -> list[WireBytes]:
    """The overflow flag with fp16 and the norm where gradients are clipped, over all ranks."""
    numbers = (strategy.precision is Precision.FP16) + (strategy.clip_norm is not None)
    each = 2 * (strategy.ranks - 1) * strategy.precision.optimizer.size_bytes
    return [WireBytes(group="world", collective="all_reduce", bytes=numbers * each, scalar=True)]
