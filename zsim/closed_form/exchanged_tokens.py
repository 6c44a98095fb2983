"""Copies of tokens that expert ranks exchange, and their gradients."""

from zsim.closed_form.checkpoint import recomputed
from zsim.model.model import Model
from zsim.schedule.schedule import HostBytes, WireBytes
from zsim.strategy.strategy import Strategy


def tokens_of_experts(model: Model, strategy: Strategy) -> list[WireBytes]:
    """Return the volume of exchanges: of a rank's blocks, all but its own are sent.

    They are sent in forward and in recomputation, and their gradients in backward. Counts of copies
    are gathered in forward, or exchanged as copies are.
    """
    ranks, again = strategy.parallel.expert, recomputed(model, strategy)
    sent = counted = 0
    gathers = not strategy.execution.weighs_at_source
    for unit in model.units if ranks > 1 else ():
        for segment in unit.segments:
            if not segment.swaps:
                continue
            forward = 1 + (unit.name in again and segment.sums_output(again=True))
            for value in segment.outputs:
                if value == segment.counts:
                    counted += value.size_bytes if gathers else 0
                    sent += 0 if gathers else value.size_bytes // ranks
                    continue
                goes_back = value.requires_gradient and model.runs_backward(segment)
                block = -(-value.elements // ranks) * value.dtype.size_bytes
                sent += (forward + goes_back) * block
    times = strategy.train.gradient_accumulation_steps * (ranks - 1)
    return [
        WireBytes(group="expert", collective="all_to_all", bytes=times * sent),
        WireBytes(group="expert", collective="all_gather", bytes=times * counted),
    ]


def counts_on_host(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes of the counts that are copied to host memory: of all ranks and experts.

    If ranks exchange them, each copies only the counts of its experts.
    """
    found = sum(
        segment.counts.size_bytes
        for unit in model.units
        for segment in unit.segments
        if segment.counts is not None
    )
    sources = 1 if strategy.execution.weighs_at_source else strategy.parallel.expert
    times = strategy.train.gradient_accumulation_steps * sources
    return HostBytes(to_host=times * found, from_host=0)
