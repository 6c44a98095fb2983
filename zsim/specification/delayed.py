"""Training whose updates are one step late: ZeRO-Offload's delayed parameter update.

Ren et al. 2021, section 5.2. The first steps are plain ones. From then on the gradients of a step
are kept until the next one has run forward and backward, and are applied then: that step does not
see them, the one after it does. What is kept beside the gradients is what applying them needs: the
scale that they were made with, and whether one of them overflowed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zsim.specification.residues import Numbers, product, share
from zsim.specification.step import TrainingState

Apply = Callable[[TrainingState, dict[str, Numbers]], TrainingState]
"""The plain update: a state and its mean gradients, the next state."""


@dataclass(frozen=True, kw_only=True)
class DelayedState:
    """State between two steps.

    Attributes:
        training: what the next step computes with.
        pending: the gradients of the step before, times `scale`.
        scale: the loss scale that they were made with.
        overflowed: whether one of them is not finite: then they are never applied.
        valid: whether there are any; not at first, nor where the last step updated at once.
        warm_up: steps that are left before updates are delayed.
    """

    training: TrainingState
    pending: Mapping[str, Numbers]
    scale: float = 1.0
    overflowed: bool = False
    valid: bool = False
    warm_up: float = 0.0

    def applied(self, apply: Apply) -> TrainingState:
        """Return the training once what is pending is applied."""
        if not self.valid or self.overflowed:
            return self.training
        gradients = {
            name: product(each, share(self.scale, each.ndim)) for name, each in self.pending.items()
        }
        return apply(self.training, gradients)

    def after(
        self, gradients: dict[str, Numbers], apply: Apply, *, scale: float, overflows: bool
    ) -> "DelayedState":
        """Return the state after a step whose mean gradients, times `scale`, are these."""
        pending = replace(
            self,
            training=self.applied(apply),
            pending=gradients,
            scale=scale,
            overflowed=overflows,
            valid=True,
        )
        if not self.warm_up:
            return pending
        return replace(
            pending, training=pending.applied(apply), valid=False, warm_up=self.warm_up - 1
        )
