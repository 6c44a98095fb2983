"""The scheduler: a model and a strategy in, a schedule out.

Each technique stands in its own file, and `own` composes zsim's own ZeRO stages of them; `emulate`
has the orders of other runtimes. Nothing here knows a clock, a cluster or a number of ranks beyond
the sizes of the axes.
"""

from zsim.garbage import uncollected
from zsim.model import Model, ModelError
from zsim.runtime.deepspeed import DeepSpeed
from zsim.runtime.fsdp1 import FSDP1
from zsim.runtime.fsdp2 import FSDP2
from zsim.runtime.megatron import Megatron
from zsim.runtime.nanotron import Nanotron
from zsim.schedule import Schedule
from zsim.strategy import Strategy, StrategyError
from zsim.zero import own
from zsim.zero.emulate import (
    deepspeed3,
    deepspeed12,
    fsdp1,
    fsdp2,
    megatron,
    nanotron,
    nanotron_pipeline,
)

__all__ = ["schedule"]


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What every rank does to train `model` as `strategy` says.

    Raises:
        ModelError: the model was resolved for another tensor degree, a checkpoint cannot be
            partitioned, or there is nothing that another runtime could train.
    """
    if strategy.emulate is not None and not model.parameters:
        raise ModelError("parameters: none; only zsim's own stages take such a model")
    with uncollected():
        return _made(model, strategy)


def _made(model: Model, strategy: Strategy) -> Schedule:
    """The schedule of zsim's own stages, or of the runtime that is emulated."""
    match strategy.emulate:
        case None:
            return own.schedule(model, strategy)
        case FSDP1() as options:
            return fsdp1.schedule(model, strategy, options)
        case FSDP2() as options:
            return fsdp2.schedule(model, strategy, options)
        case DeepSpeed() as options if strategy.stage == 3:
            return deepspeed3.schedule(model, strategy, options)
        case Megatron() as options:
            return megatron.schedule(model, strategy, options)
        case Nanotron() as options if strategy.pipeline > 1:
            return nanotron_pipeline.schedule(model, strategy, options)
        case Nanotron() as options:
            return nanotron.schedule(model, strategy, options)
        case DeepSpeed() as options if strategy.stage < 3:
            return deepspeed12.schedule(model, strategy, options)
        case runtime:
            raise StrategyError(f"emulate: {type(runtime).__name__} has no schedule yet")
