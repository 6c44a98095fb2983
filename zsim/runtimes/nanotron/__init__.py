"""nanotron, with and without a pipeline."""

from zsim.model.model import Model
from zsim.runtimes.nanotron import pipeline as nanotron_pipeline
from zsim.runtimes.nanotron import schedule as nanotron
from zsim.runtimes.nanotron.options import Nanotron
from zsim.runtimes.nanotron.volume import VOLUME
from zsim.runtimes.registry import Runtime
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all stages of a pipeline, or of the one that there is."""
    if strategy.parallel.pipeline > 1:
        return nanotron_pipeline.schedule(model, strategy)
    return nanotron.schedule(model, strategy)


RUNTIME = Runtime(options=Nanotron, schedule=schedule, volume=lambda _: VOLUME)
