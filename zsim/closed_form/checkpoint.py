"""Activation checkpoints for recomputation: their values, sizes, and whether they are moved."""

from collections import Counter
from collections.abc import Iterator, Sequence

from zsim.model.model import BATCH, Model, Unit, Value
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy


def goes_back(model: Model, unit: Unit) -> bool:
    """Return True if a unit has a backward, unlike units before the first trained parameter."""
    return not unit.segments or any(model.runs_backward(each) for each in unit.segments)


def recomputed(model: Model, strategy: Strategy) -> set[str]:
    """Return the names of units that are recomputed before their backward."""
    if strategy.activations.checkpointing is not Checkpointing.FULL:
        return set()
    blocks = [units for units in model.checkpointed_together if units[0].checkpoint]
    nth = strategy.activations.every_nth
    chosen = (unit for units in blocks[nth - 1 :: nth] for unit in units)
    return {unit.name for unit in chosen if goes_back(model, unit)}


def recomputed_with_block(model: Model, strategy: Strategy) -> set[str]:
    """Return names of units in recomputed blocks that consist of several units."""
    again = recomputed(model, strategy)
    return {
        unit.name
        for block in model.checkpointed_together
        if len(block) > 1 and any(each.name in again for each in block)
        for unit in block
    }


def moved(model: Model, strategy: Strategy) -> Iterator[Value]:
    """Yield checkpoints that are moved from the device, in the order of forward.

    These are the inputs of recomputed blocks that have a gradient and that no other block reads.
    """
    if not strategy.moves_checkpoints:
        return
    readers = Counter(name for units in model.checkpointed_together for name in _given(units))
    again = recomputed(model, strategy)
    for units in model.checkpointed_together:
        if not any(unit.name in again for unit in units):
            continue
        read = dict.fromkeys(
            name for unit in units for segment in unit.segments for name in segment.inputs
        )
        for name in (each for each in read if each in _given(units)):
            value = model.values[name]
            if value.requires_gradient and readers[name] == 1:
                yield value


def kept_bytes(model: Model, strategy: Strategy) -> int:
    """Return a rank's bytes of all moved checkpoints of a micro-batch; with Pa, its share."""
    parts = strategy.parallel.tensor if strategy.cuts_checkpoints else 1
    return sum(value.size_bytes // parts for value in moved(model, strategy))


def _given(units: Sequence[Unit]) -> set[str]:
    segments = [segment for unit in units for segment in unit.segments]
    own = {value.name for segment in segments for value in segment.outputs}
    return {name for segment in segments for name in segment.inputs} - own - {BATCH}
