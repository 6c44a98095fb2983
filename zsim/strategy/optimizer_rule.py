"""Rules that change gradients and parameters, with their constants."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

Rate = float | str
"""A learning rate: a number, or the name of the host scalar that the caller gives it in."""

LEARNING_RATE = "learning_rate"
"""That scalar, where a scenario asks for one."""


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
        """Numbers that it keeps for each element: averages of the gradient and of its square."""
        return 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Stochastic gradient descent as `torch.optim.SGD` has it, without dampening.

    With `momentum` it keeps a buffer, which becomes momentum * buffer + gradient and takes the
    gradient's place; with `nesterov` gradient + momentum * buffer does. The buffer begins at zero,
    so that after the first step it is the gradient, as in PyTorch. `weight_decay` times the
    parameter is added to the gradient first.
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
        """Numbers that it keeps for each element: the momentum buffer, if there is momentum."""
        return 1 if self.momentum else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipNorm:
    """Scale gradients so that their global 2-norm is at most `maximum`.

    The coefficient is min(1, maximum / (norm + epsilon)), as torch.nn.utils.clip_grad_norm_.
    """

    maximum: float
    epsilon: float = 1e-6


Optimizer = Adam | SGD
"""Rules that updates go by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters that have a rule of their own, as one of `param_groups` in PyTorch.

    `parameters` are patterns of names as `fnmatch` has them: `*.bias`.
    """

    parameters: tuple[str, ...]
    rule: Optimizer

    def holds(self, name: str) -> bool:
        """Return whether the parameter called `name` is one of them."""
        return any(fnmatchcase(name, pattern) for pattern in self.parameters)


def rate_of(rule: Optimizer, scalars: Mapping[str, float]) -> float:
    """Return the learning rate of a rule, where the host's scalars are these."""
    rate = rule.learning_rate
    return scalars[rate] if isinstance(rate, str) else rate


def settled(rule: Optimizer, scalars: Mapping[str, float]) -> Optimizer:
    """Return the rule with a number for its learning rate."""
    return replace(rule, learning_rate=rate_of(rule, scalars))


Rule = Optimizer | ClipNorm
