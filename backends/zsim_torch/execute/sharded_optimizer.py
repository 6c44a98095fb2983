"""The optimizer on shards: update, norm, unscale, clip, finite test. All in place on flat views."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from zsim.strategy.optimizer_rule import SGD, Adam, ClipNorm, Rule, rate_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """Flat tensors of equal size that an update reads and writes.

    `trained` are the masters, or without them the parameters themselves; `moments` Adam's first and
    second, or the momentum buffer of SGD.
    """

    gradient: torch.Tensor
    trained: torch.Tensor
    moments: tuple[torch.Tensor, ...]


def update(rule: Rule | None, operands: Updated, scalars: Mapping[str, float]) -> None:
    """Apply one step of `rule`; Adam reads the number of the step, from 1, in scalar "step"."""
    if rule is None or isinstance(rule, ClipNorm):
        raise ValueError(f"update: {rule} is no optimizer")
    rate = rate_of(rule, scalars)
    match rule:
        case SGD():
            _sgd(rule, operands, rate)
        case Adam():
            _adam(rule, operands, rate, scalars["step"])
        case _:
            assert_never(rule)


def _sgd(rule: SGD, operands: Updated, rate: float) -> None:
    """As `torch.optim.SGD` has it; the buffer begins at zero."""
    gradient = operands.gradient.to(operands.trained.dtype)
    if rule.weight_decay:
        gradient = gradient.add(operands.trained, alpha=rule.weight_decay)
    for buffer in operands.moments:
        buffer.mul_(rule.momentum).add_(gradient)
        gradient = gradient.add(buffer, alpha=rule.momentum) if rule.nesterov else buffer
    operands.trained.add_(gradient, alpha=-rate)


def _adam(rule: Adam, operands: Updated, rate: float, step: float) -> None:
    """Kingma and Ba 2015, algorithm 1; decay as in Loshchilov and Hutter 2019, algorithm 2."""
    first, second = operands.moments
    gradient = operands.gradient.to(first.dtype)
    if rule.weight_decay:
        operands.trained.mul_(1 - rate * rule.weight_decay)
    first.lerp_(gradient, 1 - rule.beta1)
    second.mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
    correction = math.sqrt(1 - rule.beta2**step)
    divisor = second.sqrt().div_(correction).add_(rule.epsilon)
    operands.trained.addcdiv_(first, divisor, value=-rate / (1 - rule.beta1**step))


def sum_of_squares(gradients: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Write the sum of squares of all elements, added in its format, to `target`."""
    target.zero_()
    for gradient in gradients:
        if gradient.numel():
            norm = torch.linalg.vector_norm(gradient, dtype=target.dtype)
            target.addcmul_(norm, norm)


def is_finite(gradients: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Write 1 to `target` where an element is infinite or not a number, else 0."""
    target.zero_()
    for gradient in gradients:
        if gradient.numel():
            bad = torch.isfinite(gradient).all().logical_not().to(target.dtype)
            torch.maximum(target, bad, out=target)


def unscale(gradient: torch.Tensor, scale: float) -> None:
    """Divide by the loss scale."""
    gradient.div_(scale)


def clip(
    rule: Rule | None, squares: torch.Tensor, gradients: Sequence[torch.Tensor], scale: float
) -> None:
    """Scale gradients so that their norm is at most the rule's.

    `squares` is the sum of squares of all gradients, which were larger by `scale` when it was
    taken. The host does not read it.
    """
    if not isinstance(rule, ClipNorm):
        raise ValueError(f"clip: {rule} does not clip")  # noqa: TRY004  (a fault of the schedule)
    norm = squares.sqrt().div_(scale)
    factor = (rule.maximum / (norm + rule.epsilon)).clamp_(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.dtype))
