"""Summands inside units, partitioned checkpoints and cut hidden states, over the tensor axis."""

from zsim.closed_form.checkpoint import moved, recomputed
from zsim.model.model import Model, Segment, Unit
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def tensor(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of summands inside units, and of partitioned checkpoints."""
    again = recomputed(model, strategy)
    reduced = sum(
        _unit_all_reduce(model, unit, recomputed=unit.name in again) for unit in model.units
    )
    gathered = 0
    if strategy.cuts_checkpoints:
        gathered = sum(
            value.size_bytes // strategy.parallel.tensor * (strategy.parallel.tensor - 1)
            for value in moved(model, strategy)
        )
    micro_batches = strategy.train.gradient_accumulation_steps
    return [
        WireBytes(group="tensor", collective="all_reduce", bytes=micro_batches * reduced),
        WireBytes(group="tensor", collective="all_gather", bytes=micro_batches * gathered),
    ]


def _unit_all_reduce(model: Model, unit: Unit, *, recomputed: bool) -> int:
    """Return bytes that a rank sends in the unit's all-reduces for one micro-batch."""
    total = 0
    for segment in unit.segments:
        if segment.reduces_output:
            total += (1 + (recomputed and segment.sums_output(again=True))) * sum(
                _ring(model, value.name) for value in segment.outputs if not value.tensor_sharded
            )
        if segment.reduces_input_gradient and model.runs_backward(segment):
            total += sum(
                _ring(model, name)
                for name in segment.inputs
                if model.values[name].requires_gradient and not model.values[name].tensor_sharded
            )
    return total


def _ring(model: Model, value: str) -> int:
    """Return bytes that a rank sends when `value` is all-reduced over the tensor axis."""
    whole = model.values[value]
    return 2 * (model.tensor - 1) * -(-whole.elements // model.tensor) * whole.dtype.size_bytes


def sequence(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of hidden states cut by tokens: of a rank's own, to each other rank."""
    gathered = scattered = 0
    again = recomputed(model, strategy)
    for unit in model.units:
        is_recomputed, is_left = unit.name in again, False
        for segment in unit.segments:
            made, read = _made(model, segment), _read(model, segment)
            scattered += (1 + (is_recomputed and segment.sums_output(again=True))) * made
            gathered += 0 if is_left else (1 + (is_recomputed and segment.runs_again)) * read
            is_left = segment.leaves_whole
            if model.runs_backward(segment):
                scattered += _read(model, segment, differentiable=True)
                gathered += made + (read if segment.saves_input else 0)
    times = strategy.train.gradient_accumulation_steps * (model.tensor - 1)
    return [
        WireBytes(group="tensor", collective="all_gather", bytes=times * gathered),
        WireBytes(group="tensor", collective="reduce_scatter", bytes=times * scattered),
    ]


def _made(model: Model, segment: Segment) -> int:
    """Return bytes of what the segment makes that is cut by tokens after it was summed."""
    if not segment.reduces_output:
        return 0
    values = [model.values[value.name] for value in segment.outputs]
    return sum(value.size_bytes for value in values if value.tensor_sharded)


def _read(model: Model, segment: Segment, *, differentiable: bool = False) -> int:
    """Return bytes of what it reads whole that is cut before; or of what is summed after."""
    if not (segment.reduces_input_gradient if differentiable else segment.reads_whole):
        return 0
    values = [model.values[name] for name in segment.inputs]
    return sum(
        value.size_bytes
        for value in values
        if value.tensor_sharded and (value.requires_gradient or not differentiable)
    )
