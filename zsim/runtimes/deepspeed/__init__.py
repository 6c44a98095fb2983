"""DeepSpeed's ZeRO stages 1 to 3."""

from zsim.closed_form import DataVolume, deepspeed3, deepspeed12
from zsim.model import Model
from zsim.runtime.deepspeed import DeepSpeed
from zsim.runtimes.registry import Runtime
from zsim.schedule import Schedule
from zsim.strategy import Strategy
from zsim.zero.emulate import deepspeed3 as stage_3
from zsim.zero.emulate import deepspeed12 as stage_1_2


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of a stage: the third has an optimizer of its own."""
    if strategy.stage == 3:
        return stage_3.schedule(model, strategy)
    return stage_1_2.schedule(model, strategy)


def volume(strategy: Strategy) -> DataVolume:
    """Return what a stage moves."""
    return deepspeed3.VOLUME if strategy.stage == 3 else deepspeed12.VOLUME


RUNTIME = Runtime(options=DeepSpeed, schedule=schedule, volume=volume)
