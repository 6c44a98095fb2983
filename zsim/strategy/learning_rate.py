"""The learning rate of each step: a warmup, then a decay."""

from enum import StrEnum
from math import cos, pi
from typing import Self

from pydantic import model_validator
from pydantic_core import InitErrorDetails

from zsim.config_error import refusal, refuse
from zsim.strategy.config_table import Count, NotNegative, Table, Whole


class Decay(StrEnum):
    """Shape of the learning rate from its peak to its minimum."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class LearningRateShape(Table):
    """`[train.learning_rates]`: a linear warmup from zero to the peak, then a decay.

    Like `get_lr` in nanoGPT's `train.py`. Steps skipped by an overflow are counted. From step
    `decay_steps` on (warmup included), the rate is `minimum`.
    """

    decay: Decay = Decay.COSINE
    warmup_steps: Whole = 0
    decay_steps: Count | None = None
    minimum: NotNegative = 0.0


class LearningRates(LearningRateShape):
    """Learning rates that rise to `peak`."""

    peak: NotNegative

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        found: list[InitErrorDetails] = []
        if self.minimum > self.peak:
            why = f"must be from 0 to the peak {self.peak}"
            found.append(refusal("minimum", self.minimum, why))
        if self.decay is Decay.CONSTANT:
            if self.decay_steps is not None:
                why = "is not for decay = constant"
                found.append(refusal("decay_steps", self.decay_steps, why))
        elif self.decay_steps is None or self.decay_steps <= self.warmup_steps:
            given = "missing" if self.decay_steps is None else f"{self.decay_steps}"
            why = f"{given}; must be more than warmup_steps {self.warmup_steps}"
            found.append(refusal("decay_steps", None, why))
        refuse(found)
        return self

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps is None:
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = (1 + cos(pi * done)) / 2 if self.decay is Decay.COSINE else 1 - done
        return self.minimum + left * (self.peak - self.minimum)
