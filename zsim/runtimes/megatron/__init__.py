"""Megatron-LM's distributed optimizer, with and without a pipeline."""

from zsim.model.model import Model
from zsim.runtimes.megatron import pipeline
from zsim.runtimes.megatron import schedule as megatron
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.megatron.volume import VOLUME
from zsim.runtimes.registry import Runtime
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all stages of a pipeline, or of the one that there is."""
    if strategy.parallel.pipeline > 1:
        return pipeline.schedule(model, strategy)
    return megatron.schedule(model, strategy)


RUNTIME = Runtime(options=Megatron, schedule=schedule, volume=lambda _: VOLUME)
