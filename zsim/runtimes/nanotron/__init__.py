"""nanotron, with and without a pipeline."""

from zsim.closed_form.nanotron import VOLUME
from zsim.model import Model
from zsim.runtime.nanotron import Nanotron
from zsim.runtimes.registry import Runtime
from zsim.schedule import Schedule
from zsim.strategy import Strategy
from zsim.zero.emulate import nanotron, nanotron_pipeline


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all stages of a pipeline, or of the one that there is."""
    if strategy.pipeline > 1:
        return nanotron_pipeline.schedule(model, strategy)
    return nanotron.schedule(model, strategy)


RUNTIME = Runtime(options=Nanotron, schedule=schedule, volume=lambda _: VOLUME)
