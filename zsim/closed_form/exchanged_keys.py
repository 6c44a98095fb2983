"""Keys and values of ranks that share a sequence, and their gradients."""

from zsim.closed_form.by_model import kept_by_model
from zsim.closed_form.checkpoint import recomputed
from zsim.model.model import Model
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def shared_sequence(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of exchanges: a rank's own keys and values, sent to each other rank.

    They are sent in forward, in recomputation, and in backward. Their gradients return in
    backward: to the rank that owns them, or around a ring in the format of the optimizer.
    """
    ranks = strategy.parallel.context
    if ranks == 1:
        return []
    key = "shared sequence", strategy.activations, strategy.train.precision
    gathered, scattered, passed = kept_by_model(model, key, lambda: _exchanged(model, strategy))
    batches = strategy.train.gradient_accumulation_steps
    others = batches * (ranks - 1)
    return [
        WireBytes(group="context", collective="all_gather", bytes=others * gathered),
        WireBytes(group="context", collective="reduce_scatter", bytes=others * scattered),
        WireBytes(group="context", collective="send", bytes=batches * passed),
    ]


def _exchanged(model: Model, strategy: Strategy) -> tuple[int, int, int]:
    """Return the bytes of a micro-batch that are gathered, scattered, and sent around a ring."""
    again, wide = recomputed(model, strategy), strategy.train.precision.wide.size_bytes
    gathered = scattered = passed = 0
    for unit in model.units:
        for segment in unit.segments:
            name = segment.shared_input or segment.passed_input
            if name is None:
                continue
            value, goes_back = model.values[name], model.runs_backward(segment)
            times = 1 + (unit.name in again) + (goes_back and segment.saves_input)
            comes_back = goes_back and value.requires_gradient
            if segment.shared_input is not None:
                gathered += times * value.size_bytes
                scattered += comes_back * value.size_bytes
            else:
                passed += times * value.size_bytes + comes_back * value.elements * wide
    return gathered, scattered, passed
