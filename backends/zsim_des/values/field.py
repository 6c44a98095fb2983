"""Exact arithmetic: whole numbers modulo a prime, in float64, so that "not a number" is poison.

Below 2**26 a product of two numbers, plus a third, is exact in float64 (53 bits); products are
reduced one by one, since a third factor would overflow. What touches a NaN is NaN.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

PRIME = 67_108_859
"""The largest prime below 2**26; a test divides it by all smaller primes."""


@lru_cache(maxsize=4096)
def number(value: float) -> int:
    """`value`, a fraction with a power of two below it, in the field.

    Raises:
        ValueError: `value` is not finite.
    """
    exact = Fraction(value)
    return exact.numerator * pow(exact.denominator, -1, PRIME) % PRIME


def inverse(value: int) -> int:
    """The number whose product with `value` is 1; of 0 it is 0."""
    return pow(value, PRIME - 2, PRIME)


def reduced(numbers: Numbers) -> Numbers:
    """`numbers` modulo the prime."""
    return np.remainder(numbers, PRIME)


def product(one: Numbers, other: Numbers | float) -> Numbers:
    """Element by element."""
    return np.remainder(one * other, PRIME)


def dot(one: Numbers, other: Numbers) -> float:
    """Sum of the products: exact up to 2**27 of them."""
    return float(np.remainder(np.remainder(one * other, PRIME).sum(), PRIME))


def times(*factors: float) -> float:
    """Product of single numbers."""
    found = 1.0
    for factor in factors:
        found = found * factor % PRIME
    return found


@lru_cache(maxsize=4096)
def constants(key: str, size: int) -> Numbers:
    """`size` numbers from 1 up that belong to `key` alone, always the same."""
    drawn = np.random.default_rng([crc32(key.encode()), len(key), size])
    found = drawn.integers(1, PRIME, size).astype(np.float64)
    found.flags.writeable = False
    return found


def joined(parts: Sequence[Numbers]) -> Numbers:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0)
