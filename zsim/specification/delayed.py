"""Training whose updates are one step late: ZeRO-Offload's delayed parameter update.

Ren et al. 2021, section 5.2. The first steps (warm-up) update at once. After them, the gradients
of a step are kept and applied when the next step has run forward and backward, so that only the
step after it sees them. The state also holds the loss scale of the kept gradients, and whether one
of them overflowed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from zsim.specification.residues import Numbers, product, share
from zsim.specification.step import TrainingState

Apply = Callable[[TrainingState, dict[str, Numbers]], TrainingState]
"""The plain update: maps a state and its mean gradients to the next state."""


@dataclass(frozen=True, kw_only=True)
class DelayedState:
    """State between two steps.

    Attributes:
        training: the state with which the next step computes.
        pending: the gradients of the previous step, times `scale`.
        scale: the loss scale of the pending gradients.
        overflowed: whether one of them is not finite; such gradients are never applied.
        valid: whether gradients are pending: not at first, nor if the last step updated at once.
        warm_up: remaining steps before updates are delayed.
    """

    training: TrainingState
    pending: Mapping[str, Numbers]
    scale: float = 1.0
    overflowed: bool = False
    valid: bool = False
    warm_up: float = 0.0

    def applied(self, apply: Apply) -> TrainingState:
        """Return the training state after the pending gradients are applied."""
        if not self.valid or self.overflowed:
            return self.training
        gradients = {
            name: product(each, share(self.scale, each.ndim)) for name, each in self.pending.items()
        }
        return apply(self.training, gradients)

    def after(
        self, gradients: dict[str, Numbers], apply: Apply, *, scale: float, overflows: bool
    ) -> "DelayedState":
        """Return the state after a step with these mean gradients, times `scale`."""
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
