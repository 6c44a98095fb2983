"""Hidden states that are cut by tokens over the tensor axis: what is gathered and scattered."""

from zsim.closed_form.checkpoint import recomputed
from zsim.model.model import Model, Segment
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def sequence(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Volume of a step: bytes of a rank's own tokens go to each of the others."""
    gathered = scattered = 0
    for unit in model.units:
        runs = 2 if recomputed(model, unit, strategy) else 1
        for segment in unit.segments:
            made, read = _made(model, segment), _read(model, segment)
            scattered += runs * made
            gathered += runs * read
            if model.runs_backward(segment):
                scattered += _read(model, segment, sloped=True)
                gathered += made + (read if segment.saves_input else 0)
    times = strategy.gradient_accumulation_steps * (model.tensor - 1)
    return [
        WireBytes(group="tensor", collective="all_gather", bytes=times * gathered),
        WireBytes(group="tensor", collective="reduce_scatter", bytes=times * scattered),
    ]


def _made(model: Model, segment: Segment) -> int:
    """Bytes of what the segment makes that is cut by tokens after it was summed."""
    if not segment.reduces_output:
        return 0
    values = [model.values[value.name] for value in segment.outputs]
    return sum(value.size_bytes for value in values if value.tensor_sharded)


def _read(model: Model, segment: Segment, *, sloped: bool = False) -> int:
    """Bytes of what it reads whole that is cut by tokens before; of what has a gradient alone."""
    if not segment.reduces_input_gradient:
        return 0
    values = [model.values[name] for name in segment.inputs]
    return sum(
        value.size_bytes
        for value in values
        if value.tensor_sharded and (value.requires_gradient or not sloped)
    )
