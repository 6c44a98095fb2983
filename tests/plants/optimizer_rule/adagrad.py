"""Adagrad, an element-wise rule that zsim does not have: the whole package is this file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from zsim.strategy.config_table import NotNegative
from zsim.strategy.optimizer_rule import Optimizer, Rate, Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011) as `torch.optim.Adagrad`; sums of squares start at zero."""

    torch: ClassVar[Mapping[str, str]] = {"Adagrad": "Adagrad"}

    learning_rate: Rate = 1e-2
    lr_decay: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    epsilon: NotNegative = 1e-10

    @property
    def states(self) -> tuple[str, ...]:
        """Return the sum of the squares of all gradients."""
        return ("sum",)

    @property
    def counts_steps(self) -> bool:
        """Return True if the learning rate decays."""
        return self.lr_decay > 0

    @property
    def flops(self) -> int:
        """Return 2 for the sum, 2 for its root and 2 for the step; 2 for the decay of weights."""
        return 6 + 2 * bool(self.weight_decay)

    @property
    def arguments(self) -> Iterator[tuple[str, float]]:
        """Yield what each call of torch is given in all steps."""
        if not isinstance(self.learning_rate, str) and not self.lr_decay:
            yield "learning rate", -self.learning_rate
        yield "epsilon", self.epsilon
        if self.weight_decay:
            yield "decay", self.weight_decay

    def update(
        self,
        gradient: Tensor,
        trained: Tensor,
        states: Sequence[Tensor],
        *,
        rate: float,
        step: float,
    ) -> None:
        """Update in the order of `torch.optim.Adagrad`."""
        (squares,) = states
        if self.weight_decay:
            gradient = gradient.add(trained, alpha=self.weight_decay)
        decayed = rate / (1 + (step - 1) * self.lr_decay) if self.lr_decay else rate
        squares.addcmul_(gradient, gradient, value=1)
        trained.addcdiv_(gradient, squares.sqrt().add_(self.epsilon), value=-decayed)
