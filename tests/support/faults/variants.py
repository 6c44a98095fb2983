"""Changes of strategies by name: rules of updates, formats, sizes of groups and buckets."""

from dataclasses import replace

from zsim.strategy.activations import Checkpointing
from zsim.strategy.optimizer_rule import LEARNING_RATE, SGD, Adam, ParameterGroup
from zsim.strategy.precision import Precision
from zsim.strategy.train import LossScale

ADAM = Adam(learning_rate=0.01, epsilon=1e-5, weight_decay=0.1)
NO_DECAY = (ParameterGroup(parameters=("*.ln*",), rule=replace(ADAM, weight_decay=0.0)),)
GIVEN = replace(ADAM, learning_rate=LEARNING_RATE)
MOMENTUM = SGD(learning_rate=LEARNING_RATE, momentum=0.875, weight_decay=0.125, nesterov=True)
SCALE = LossScale(interval=2)

Changes = dict[str, object]
"""Values of a strategy by key."""
FP16: Changes = {"train.precision": Precision.FP16}
BF16: Changes = {"train.precision": Precision.BF16}
CLIPPED: Changes = {"train.clip_norm": 1.0}
UNCLIPPED: Changes = {"train.clip_norm": None}
RECOMPUTED: Changes = {"activations.checkpointing": Checkpointing.FULL}
GROUPED: Changes = {"train.groups": NO_DECAY}
SCALED: Changes = {"train.loss_scale": SCALE}


def over(**degrees: int) -> Changes:
    """Return degrees of parallelism by axis."""
    return {f"parallel.{axis}": degree for axis, degree in degrees.items()}


def zero(**options: object) -> Changes:
    """Return options of ZeRO."""
    return {f"zero.{name}": value for name, value in options.items()}


def by(rule: object) -> Changes:
    """Return the rule of updates."""
    return {"train.optimizer": rule}


def accumulating(micro_batches: int) -> Changes:
    """Return the number of micro-batches."""
    return {"train.gradient_accumulation_steps": micro_batches}
