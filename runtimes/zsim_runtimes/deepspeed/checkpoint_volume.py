"""Bytes of checkpoints that DeepSpeed copies to host memory and back in a step.

With a copy stream, the last checkpoint of a micro-batch stays on the device, and the copy of the
one before it is never read (`keep_last_count`, `max_fwd_stash_count`).
"""

from zsim.closed_form.checkpoint import moved
from zsim.closed_form.offloaded import checkpoint_bytes
from zsim.model.model import Model
from zsim.schedule.schedule import HostBytes
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed


def checkpoints(model: Model, strategy: Strategy) -> HostBytes:
    """Return the bytes that a rank copies out and back."""
    options = strategy.options(DeepSpeed)
    if not options.checkpoint_stream or strategy.activations.partition:
        return checkpoint_bytes(model, strategy)
    sizes = [value.size_bytes for value in moved(model, strategy)]
    times = strategy.train.gradient_accumulation_steps
    return HostBytes(to_host=times * sum(sizes[:-1]), from_host=times * sum(sizes[:-2]))
