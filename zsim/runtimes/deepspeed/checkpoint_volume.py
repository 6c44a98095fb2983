"""Checkpoints that DeepSpeed copies to the host's memory in a step, and from there.

With a stream of copies the last of a micro-batch stays on the device, and of the one before it a
copy goes out that nobody reads (`keep_last_count`, `max_fwd_stash_count`).
"""

from zsim.closed_form.checkpoint import moved
from zsim.closed_form.offloaded import checkpoint_bytes
from zsim.model.model import Model
from zsim.runtimes.deepspeed.options import DeepSpeed
from zsim.schedule.schedule import HostBytes
from zsim.strategy.strategy import Strategy


def checkpoints(model: Model, strategy: Strategy) -> HostBytes:
    """Return what a rank copies out and back."""
    options = strategy.options(DeepSpeed)
    if not options.checkpoint_stream or strategy.activations.partition:
        return checkpoint_bytes(model, strategy)
    sizes = [value.size_bytes for value in moved(model, strategy)]
    times = strategy.train.gradient_accumulation_steps
    return HostBytes(to_host=times * sum(sizes[:-1]), from_host=times * sum(sizes[:-2]))
