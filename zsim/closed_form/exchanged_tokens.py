"""Copies of tokens that expert ranks exchange, and their gradients."""

from zsim.closed_form.checkpoint import recomputed
from zsim.model.model import Model
from zsim.schedule.schedule import WireBytes
from zsim.strategy.strategy import Strategy


def tokens_of_experts(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of exchanges: of a rank's blocks, all but its own are sent.

    They are sent in forward and in recomputation, and their gradients in backward.
    """
    ranks, again = strategy.parallel.expert, recomputed(model, strategy)
    sent = 0
    for unit in model.units if ranks > 1 else ():
        for segment in unit.segments:
            if not segment.swaps:
                continue
            forward = 1 + (unit.name in again and segment.sums_output(again=True))
            for value in segment.outputs:
                goes_back = value.requires_gradient and model.runs_backward(segment)
                sent += (forward + goes_back) * (value.size_bytes // ranks)
    times = strategy.train.gradient_accumulation_steps * (ranks - 1)
    return [WireBytes(group="expert", collective="all_to_all", bytes=times * sent)]
