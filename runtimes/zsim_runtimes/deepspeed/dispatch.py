"""DeepSpeed: the schedule and the volume of a stage."""

from zsim.closed_form import DataVolume
from zsim.model.model import Model
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed import expert_layers, stage_0, stage_0_volume, stage_1_2, stage_3
from zsim_runtimes.deepspeed import stage_1_2_volume as deepspeed12
from zsim_runtimes.deepspeed import stage_3_volume as deepspeed3


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of a stage; stage 3 has a separate optimizer."""
    if strategy.zero.stage == 3:
        return stage_3.schedule(model, strategy)
    if strategy.zero.stage == 0:
        return stage_0.schedule(model, strategy)
    return stage_1_2.schedule(model, strategy)


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError if a schedule of the stage cannot be written.

    Raises:
        ModelError: stage 0 has no masters in bf16, or experts cannot have expert ranks.
    """
    expert_layers.need(model, strategy)
    stage_0.need(strategy)


def volume(strategy: Strategy) -> DataVolume:
    """Return the data volumes of the strategy's stage."""
    if strategy.zero.stage == 0:
        return stage_0_volume.VOLUME
    return deepspeed3.VOLUME if strategy.zero.stage == 3 else deepspeed12.VOLUME
