"""FSDP2: the schedule with and without a pipeline, its checks and its volume."""

from zsim.closed_form import DataVolume
from zsim.model.model import Model, ModelError
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.fsdp2 import pipeline as fsdp2_pipeline
from zsim_runtimes.fsdp2 import schedule as fsdp2
from zsim_runtimes.fsdp2.options import FSDP2
from zsim_runtimes.fsdp2.volume import VOLUME


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless options, micro-batches and pipeline stages fit together.

    Raises:
        ModelError: they do not, or an interleaved schedule has no pipeline.
    """
    options = strategy.options(FSDP2)
    if strategy.parallel.pipeline > 1:
        fsdp2_pipeline.need(model, strategy)
    elif options.is_interleaved:
        raise ModelError(
            f"zero.fsdp2.pipeline_schedule: {options.pipeline_schedule} needs parallel.pipeline > 1"
        )


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all pipeline stages, or of the single stage.

    Raises:
        ModelError: the model does not fit the strategy.
    """
    of_stages = strategy.parallel.pipeline > 1
    return (fsdp2_pipeline.schedule if of_stages else fsdp2.schedule)(model, strategy)


def volume(strategy: Strategy) -> DataVolume:
    """Return the data volumes of every schedule."""
    del strategy
    return VOLUME
