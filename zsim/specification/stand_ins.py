"""Stand-ins of kernels: random functions, drawn for each proof, of exactly a kernel's inputs.

The only assumptions about a kernel are its inputs, and linearity where training needs it: backward
is linear in the gradients of the outputs, clipping and unscaling in the gradient. Updates work
element by element and map zeros to zeros, as padding requires.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from zsim.specification.residues import Numbers, Random, moduli, product, scrambled, share, summed
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer


def shaped(key: Numbers, dimensions: int) -> Numbers:
    """Return a key of shape (2, n) with `dimensions` dimensions, its numbers along the last one."""
    return key.reshape(len(key), *(1,) * (dimensions - 2), -1)


def digest(random: Random, name: str, operand: Numbers) -> Numbers:
    """Return one number for all pieces of an operand, shape (2, ..., 1), dependent on `name`."""
    if not operand.shape[-1]:
        return np.zeros((*operand.shape[:-1], 1), np.uint64)
    key = shaped(random.key(name, operand.shape[-1]), operand.ndim)
    return summed(product(operand, key), -1, keepdims=True)


def function(random: Random, name: str, digest_of_all: Numbers, count: int) -> Numbers:
    """Return `count` numbers that are a function of a digest, shape (2, ..., count)."""
    key = shaped(random.key(f"{name}/made", count), digest_of_all.ndim)
    return scrambled(digest_of_all, key)


def updated(
    random: Random,
    rule: Optimizer,
    operands: Sequence[Numbers],
    step: float | None,
) -> list[Numbers]:
    """Return new values of the trained operand and of each moment.

    Args:
        random: the source of random numbers.
        rule: the optimizer; rules with other constants give other functions.
        operands: the gradient, the trained operand, the moments: numbers of one shape.
        step: the number of the update; None if the rule does not count steps.
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
    """Return the name of an update, the same for all parameters; cached because `repr` is slow."""
    return f"update {rule!r} {operands} {step!r}"


def clipping(random: Random, rule: ClipNorm, squares: Numbers, scale: float) -> Numbers:
    """Return the factor of gradients whose sum of squares is `squares`, unscaled by `scale`**2."""
    below = share(scale, squares.ndim)
    unscaled = product(product(squares, below), below)
    return function(random, f"clip {rule!r}", unscaled, 1)
