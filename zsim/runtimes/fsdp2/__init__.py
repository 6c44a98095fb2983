"""PyTorch's FSDP2, with and without a pipeline."""

from zsim.model.model import Model, ModelError
from zsim.runtimes.fsdp2 import pipeline as fsdp2_pipeline
from zsim.runtimes.fsdp2 import schedule as fsdp2
from zsim.runtimes.fsdp2.options import FSDP2
from zsim.runtimes.fsdp2.volume import VOLUME
from zsim.runtimes.registry import Runtime
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of all stages of a pipeline, or of the one that there is.

    Raises:
        ModelError: the model does not go with the strategy.
    """
    if strategy.parallel.pipeline > 1:
        return fsdp2_pipeline.schedule(model, strategy)
    options = strategy.options(FSDP2)
    if options.is_interleaved:
        raise ModelError(
            f"zero.fsdp2.pipeline_schedule: {options.pipeline_schedule} needs parallel.pipeline > 1"
        )
    return fsdp2.schedule(model, strategy)


RUNTIME = Runtime(options=FSDP2, schedule=schedule, volume=lambda _: VOLUME)
