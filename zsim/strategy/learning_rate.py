"""The learning rate of each step, as a training loop gives it: a warmup, then a decay."""

from dataclasses import dataclass
from enum import StrEnum
from math import cos, inf, pi


class Decay(StrEnum):
    """Course of the learning rate from its peak to its minimum."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRates:
    """A warmup in a line from zero to `peak`, then a decay that ends at `minimum`.

    As `get_lr` in nanoGPT's `train.py`. Steps that an overflow skips are counted; from step number
    `decay_steps` on, warmup included, the rate is the minimum.
    """

    peak: float
    decay: Decay = Decay.COSINE
    warmup_steps: int = 0
    decay_steps: int | None = None
    minimum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.peak < inf:
            raise ValueError(f"minimum: {self.minimum} must be from 0 to the peak {self.peak}")
        if self.decay is Decay.CONSTANT:
            if self.decay_steps is not None:
                raise ValueError(f"decay_steps: {self.decay_steps} is not for decay = constant")
        elif self.decay_steps is None or self.decay_steps <= self.warmup_steps:
            given = "missing" if self.decay_steps is None else f"{self.decay_steps}"
            raise ValueError(
                f"decay_steps: {given}; must be more than warmup_steps {self.warmup_steps}"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps is None:
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = (1 + cos(pi * done)) / 2 if self.decay is Decay.COSINE else 1 - done
        return self.minimum + left * (self.peak - self.minimum)
