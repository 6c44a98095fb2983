"""Activations of the first layers that are kept in host memory until their backward."""

from collections import Counter

from zsim.model.model import BATCH, Model, Unit
from zsim.strategy.strategy import Strategy


def stored(model: Model, strategy: Strategy) -> list[Unit]:
    """Return the layers whose activations are in host memory until their backward."""
    layers = [unit for unit in model.units if unit.checkpoint]
    return layers[: strategy.layers_on_host]


def stored_bytes(model: Model, strategy: Strategy) -> int:
    """Return the bytes of a micro-batch that are copied out, and back: large kept tensors.

    A layer keeps the saved tensors of its segments, and the inputs of their backward that no other
    layer reads.
    """
    readers = Counter(name for unit in model.units for name in _read(unit))
    size, total = strategy.train.precision.compute.size_bytes, 0
    for unit in stored(model, strategy):
        backward = [each for each in unit.segments if model.runs_backward(each)]
        kept = {name for each in backward for name in each.kept_inputs} - {BATCH}
        values = [model.values[name] for name in sorted(kept) if readers[name] == 1]
        counts = [-(-each.saved_bytes // size) for each in unit.segments]
        total += sum(each.size_bytes for each in values if each.elements >= strategy.stored_least)
        total += sum(count * size for count in counts if count >= max(1, strategy.stored_least))
    return total


def _read(unit: Unit) -> set[str]:
    """Return the names of values that a unit reads, its own outputs included."""
    return {name for segment in unit.segments for name in segment.inputs}
