"""Exact numbers: residues modulo two primes below 2**31, one lane each, on numpy.

An array of numbers has the lanes first: shape (2, ...). Two independent lanes make a number of 62
bits, and a product of two residues fits in an unsigned integer of 64 bits. Two different
polynomials of degree d agree at a random point with probability at most (d / 2**31)**2 (Schwartz
1980), which is what `zsim.proof` adds up.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import prod

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]
"""Residues, lanes first."""

PRIMES = (2_147_483_647, 2_147_483_629)
"""The two largest primes below 2**31; a test divides them by all smaller ones."""

BITS = 61
"""Two numbers that are drawn apart are equal with a probability below 2**-BITS."""

_MODULI = np.array(PRIMES, np.uint64)


@lru_cache
def moduli(dimensions: int) -> Numbers:
    """Return the primes, shaped to go with an array of so many dimensions."""
    return _MODULI.reshape(-1, *(1,) * (dimensions - 1))


def product(one: Numbers, other: Numbers) -> Numbers:
    """Multiply element by element."""
    found = one * other
    found %= moduli(found.ndim)
    return found


def total(one: Numbers, other: Numbers) -> Numbers:
    """Add element by element."""
    found = one + other
    found %= moduli(found.ndim)
    return found


def added(one: Numbers, other: Numbers, *, divisor: float = 1) -> Numbers:
    """Add element by element, the second divided by a number."""
    found = other if divisor == 1 else other * share(divisor, other.ndim)
    found = one + found  # below 2**63: each is reduced, and so is their product's factor
    found %= moduli(found.ndim)
    return found


def summed(numbers: Numbers, axis: int | tuple[int, ...], *, keepdims: bool = False) -> Numbers:
    """Add up along `axis`: at most 2**33 terms."""
    found: Numbers = numbers.sum(axis=axis, keepdims=keepdims, dtype=np.uint64)
    found %= moduli(found.ndim)
    return found


def weighted(numbers: Numbers, axis: int, weights: Sequence[int]) -> Numbers:
    """Add up along `axis`, each place as often as it stands for others; one place is as all."""
    if numbers.shape[axis] == 1:
        return product(numbers, number(sum(weights), numbers.ndim))
    if any(weight != 1 for weight in weights):
        shape = [1] * numbers.ndim
        shape[axis] = -1
        numbers = product(numbers, np.array(weights, np.uint64).reshape(shape))
    return summed(numbers, axis, keepdims=True)


@lru_cache(maxsize=4096)
def number(value: float | Fraction, dimensions: int = 1) -> Numbers:
    """Return a rational number in both lanes, shaped for arrays of so many dimensions.

    Raises:
        ValueError: it is not finite.
        ZeroDivisionError: a prime divides its denominator.
    """
    lanes = _lanes(Fraction(value))
    found = np.array(lanes, np.uint64).reshape(-1, *(1,) * (dimensions - 1))
    found.flags.writeable = False  # it is handed out again
    return found


@lru_cache(maxsize=4096)
def share(value: float, dimensions: int = 1) -> Numbers:
    """Return one over a number, in both lanes, shaped for arrays of so many dimensions.

    Raises:
        ZeroDivisionError: it is zero, or a multiple of a prime.
    """
    return number(1 / Fraction(value), dimensions)


def _lanes(value: Fraction) -> tuple[int, ...]:
    if any(value.denominator % prime == 0 for prime in PRIMES):
        raise ZeroDivisionError(f"{value} has no value modulo {PRIMES}")
    return tuple(value.numerator * pow(value.denominator, -1, prime) % prime for prime in PRIMES)


class Random:
    """Draws numbers, always the same for one seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator = np.random.default_rng(seed)
        self._keyed: dict[tuple[str, int], Numbers] = {}
        self._pool: Numbers = np.zeros((len(PRIMES), 0), np.uint64)
        self._place = 0

    def draw(self, shape: Sequence[int]) -> Numbers:
        """Return new numbers, lanes first."""
        count = prod(shape)
        if self._place + count > self._pool.shape[1]:
            size = max(count, 1 << 16)
            drawn = [self._generator.integers(1, prime, size, np.uint64) for prime in PRIMES]
            self._pool, self._place = np.stack(drawn), 0
        found = self._pool[:, self._place : self._place + count]
        self._place += count
        return found.reshape(len(PRIMES), *shape)

    def key(self, name: str, count: int) -> Numbers:
        """Return `count` numbers that belong to `name` alone, shape (2, count)."""
        found = self._keyed.get((name, count))
        if found is None:
            digest = blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
            generator = np.random.default_rng(list(digest))
            found = np.stack([generator.integers(1, prime, count, np.uint64) for prime in PRIMES])
            self._keyed[name, count] = found
        return found


_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def scrambled(digest: Numbers, key: Numbers) -> Numbers:
    """Return what a random function makes of each digest: the function that `key` names.

    Both lanes become one word, which is mixed as splitmix64 does (Steele, Lea and Flood 2014), once
    for each lane.

    Args:
        digest: numbers, shape (2, ...).
        key: numbers, shape (2, ...), broadcast with the digest.
    """
    words = (digest[0] << _31) ^ digest[1]
    words = words * _ODD + ((key[0] << _31) ^ key[1])
    found = np.empty((len(PRIMES), *words.shape), np.uint64)
    for lane, prime in enumerate(PRIMES):
        words = words + _ODD
        mixed = (words ^ (words >> _30)) * _FIRST
        mixed = (mixed ^ (mixed >> _27)) * _SECOND
        found[lane] = (mixed ^ (mixed >> _31)) % np.uint64(prime)
    return found
