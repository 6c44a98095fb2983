"""Summands inside units, and partitioned checkpoints, over the tensor axis."""

from zsim.closed_form.checkpoint import moved, recomputed
from zsim.model.model import Model, Unit
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def tensor(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Summands inside units, and partitioned checkpoints, over the tensor axis."""
    reduced = sum(
        _unit_all_reduce(model, unit, recomputed=recomputed(model, unit, strategy))
        for unit in model.units
    )
    gathered = 0
    if strategy.cuts_checkpoints:
        gathered = sum(
            value.size_bytes // strategy.tensor * (strategy.tensor - 1)
            for value in moved(model, strategy)
        )
    micro_batches = strategy.gradient_accumulation_steps
    return [
        WireBytes(group="tensor", collective="all_reduce", bytes=micro_batches * reduced),
        WireBytes(group="tensor", collective="all_gather", bytes=micro_batches * gathered),
    ]


def _unit_all_reduce(model: Model, unit: Unit, *, recomputed: bool) -> int:
    """Bytes that a rank sends in the unit's all-reduces for one micro-batch."""
    total = 0
    for segment in unit.segments:
        if segment.reduces_output:
            runs = 2 if recomputed else 1
            total += runs * sum(
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
    """Bytes that a rank sends when `value` is all-reduced over the tensor axis."""
    whole = model.values[value]
    return 2 * (model.tensor - 1) * -(-whole.elements // model.tensor) * whole.dtype.size_bytes
