"""Stand-ins of kernels: functions that are drawn for each proof, of exactly what a kernel reads.

Nothing is assumed of a kernel but what it depends on, and that it is linear where training needs
that: backward in the gradients of the outputs, clipping and unscaling in the gradient. Updates work
element by element, and leave zeros alone as padding needs it.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from zsim.specification.residues import Numbers, Random, moduli, product, scrambled, share, summed
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer


def shaped(key: Numbers, dimensions: int) -> Numbers:
    """Return numbers of a key, shape (2, n), along the last of so many dimensions."""
    return key.reshape(len(key), *(1,) * (dimensions - 2), -1)


def digest(random: Random, name: str, operand: Numbers) -> Numbers:
    """Return one number of all pieces of an operand, shape (2, ..., 1), different for each name."""
    if not operand.shape[-1]:
        return np.zeros((*operand.shape[:-1], 1), np.uint64)
    key = shaped(random.key(name, operand.shape[-1]), operand.ndim)
    return summed(product(operand, key), -1, keepdims=True)


def function(random: Random, name: str, digest_of_all: Numbers, count: int) -> Numbers:
    """Return `count` numbers that depend on a digest, shape (2, ..., count)."""
    key = shaped(random.key(f"{name}/made", count), digest_of_all.ndim)
    return scrambled(digest_of_all, key)


def updated(
    random: Random,
    rule: Optimizer,
    operands: Sequence[Numbers],
    step: float | None,
) -> list[Numbers]:
    """Return new values of what is trained and of each moment.

    Args:
        random: what draws.
        rule: the optimizer; any other constant is another function.
        operands: the gradient, what is trained, the moments: numbers of one shape.
        step: the number of the update that Adam's bias correction takes; None if it has none.
    """
    name = _update_name(rule, len(operands), step)
    count, dimensions = len(operands), operands[0].ndim
    keys = random.key(name, 2 * count).reshape(2, -1, *(1,) * (dimensions - 1))
    seen = keys[:, count]
    for place, operand in enumerate(operands):
        seen = seen + product(operand, keys[:, place])
    seen = seen % moduli(dimensions)
    made = scrambled(seen[:, np.newaxis], keys[:, count + 1 :])
    zero = operands[0] == 0
    for operand in operands[1:] if zero.any() else ():
        zero = zero & (operand == 0)
    if zero.any():
        made[np.broadcast_to(zero[:, np.newaxis], made.shape)] = 0
    return [made[:, place] for place in range(count - 1)]


@lru_cache(maxsize=1024, typed=True)
def _update_name(rule: Optimizer, operands: int, step: float | None) -> str:
    """Return the name of an update, the same for all parameters; writing it takes a while."""
    return f"update {rule!r} {operands} {step!r}"


def clipping(random: Random, rule: ClipNorm, squares: Numbers, scale: float) -> Numbers:
    """Return the factor of gradients whose sum of squares, times `scale` squared, is `squares`."""
    below = share(scale, squares.ndim)
    unscaled = product(product(squares, below), below)
    return function(random, f"clip {rule!r}", unscaled, 1)
