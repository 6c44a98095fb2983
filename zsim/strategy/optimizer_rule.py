"""Update rules for gradients and parameters, with their constants."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

Rate = float | str
"""A learning rate: a number, or the name of the host scalar that holds it."""

LEARNING_RATE = "learning_rate"
"""The name of that scalar if a scenario sets the rate for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1, with bias correction; decay as in AdamW)."""

    learning_rate: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    @property
    def moments(self) -> int:
        """Numbers kept for each element: averages of the gradient and of its square."""
        return 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent as `torch.optim.SGD`, without dampening.

    First, `weight_decay` times the parameter is added to the gradient. With `momentum`, a buffer
    becomes momentum * buffer + gradient and replaces the gradient; with `nesterov`, gradient +
    momentum * buffer does. The buffer starts at zero, so that after the first step it is the
    gradient, as in PyTorch.
    """

    learning_rate: Rate = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: true needs a momentum of more than 0")

    @property
    def moments(self) -> int:
        """Numbers kept for each element: the momentum buffer, if there is momentum."""
        return 1 if self.momentum else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipNorm:
    """Scale gradients so that their global 2-norm is at most `maximum`.

    The coefficient is min(1, maximum / (norm + epsilon)), as in torch.nn.utils.clip_grad_norm_.
    """

    maximum: float
    epsilon: float = 1e-6


Optimizer = Adam | SGD
"""Update rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters with a separate rule, like one of `param_groups` in PyTorch.

    `parameters` are `fnmatch` patterns of names, such as `*.bias`.
    """

    parameters: tuple[str, ...]
    rule: Optimizer

    def holds(self, name: str) -> bool:
        """Return True if the parameter called `name` is in the group."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


def rate_of(rule: Optimizer, scalars: Mapping[str, float]) -> float:
    """Return the learning rate of a rule, given the host's scalars."""
    rate = rule.learning_rate
    return scalars[rate] if isinstance(rate, str) else rate


def settled(rule: Optimizer, scalars: Mapping[str, float]) -> Optimizer:
    """Return the rule with a number as its learning rate."""
    return replace(rule, learning_rate=rate_of(rule, scalars))


Rule = Optimizer | ClipNorm
