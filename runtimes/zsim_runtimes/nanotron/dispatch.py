"""nanotron: the schedule with and without a pipeline, and its volume."""

from zsim.closed_form import DataVolume
from zsim.model.model import Model
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.nanotron import pipeline as nanotron_pipeline
from zsim_runtimes.nanotron import schedule as nanotron
from zsim_runtimes.nanotron.volume import VOLUME


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all stages of a pipeline, or of the one that there is."""
    if strategy.parallel.pipeline > 1:
        return nanotron_pipeline.schedule(model, strategy)
    return nanotron.schedule(model, strategy)


def volume(strategy: Strategy) -> DataVolume:
    """Return the data volumes of every schedule."""
    del strategy
    return VOLUME
