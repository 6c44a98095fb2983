"""Rules that change gradients and parameters, with their constants."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1, with bias correction; decay as in AdamW)."""

    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SGD:
    """Plain stochastic gradient descent: no momentum, no state."""

    learning_rate: float = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipNorm:
    """Scale gradients so that their global 2-norm is at most `maximum`.

    The coefficient is min(1, maximum / (norm + epsilon)), as torch.nn.utils.clip_grad_norm_.
    """

    maximum: float
    epsilon: float = 1e-6


Rule = Adam | SGD | ClipNorm
