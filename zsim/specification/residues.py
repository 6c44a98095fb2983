"""Exact numbers: residues modulo two primes below 2**31, one lane per prime, on numpy.

An array of numbers has shape (2, ...), lanes first. Two independent lanes are equivalent to 61
bits, and a product of two residues fits in an unsigned integer of 64 bits. Two polynomials that
differ modulo both primes agree at a random point with probability at most d**2 / 2**BITS, d their
degree (Schwartz 1980); `zsim.proof` adds up these probabilities. Constants that differ by less
than 2**BITS differ modulo at least one of the primes; for larger ones the primes are drawn, see
`modulo`.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import prod

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]
"""Residues, lanes first."""

Primes = tuple[int, int]

BITS = 61
"""Two numbers that are drawn independently are equal with a probability below 2**-BITS."""

LOW, HIGH = 1_518_500_250, 2**31
"""Bounds of primes: the square of the lower one is 2**BITS."""

PRIMES_BITS = 24.8
"""More than 2**PRIMES_BITS primes lie within these bounds: 29.6 million."""

_PRIMES: ContextVar[Primes] = ContextVar("primes", default=(2_147_483_647, 2_147_483_629))


@contextmanager
def modulo(primes: Primes) -> Generator[Primes]:
    """Compute modulo `primes` inside the context; the default is the two largest below 2**31."""
    token = _PRIMES.set(primes)
    try:
        yield primes
    finally:
        _PRIMES.reset(token)


def drawn_primes(seed: int, divisors: Iterable[int] = ()) -> Primes:
    """Return two primes that divide none of `divisors`; deterministic for a seed."""
    avoided = [each for each in set(divisors) if each]
    found: list[int] = []
    attempt = 0
    while len(found) < 2:
        digest = blake2b(f"{seed} prime {attempt}".encode(), digest_size=8).digest()
        candidate = LOW + int.from_bytes(digest) % (HIGH - LOW)
        attempt += 1
        fits = candidate not in found and all(each % candidate for each in avoided)
        if fits and is_prime(candidate):
            found.append(candidate)
    return found[0], found[1]


def is_prime(candidate: int) -> bool:
    """Return True if `candidate` is prime; it must be even or between 9 and 2**31.

    Even numbers return False. Source: these witnesses decide below 3,215,031,751 (Pomerance,
    Selfridge and Wagstaff 1980).
    """
    if candidate % 2 == 0:
        return False
    twos = ((candidate - 1) & (1 - candidate)).bit_length() - 1
    for witness in (2, 3, 5, 7):
        power = pow(witness, (candidate - 1) >> twos, candidate)
        if power == 1:
            continue
        for _ in range(twos):
            if power == candidate - 1:
                break
            power = power * power % candidate
        else:
            return False
    return True


def moduli(dimensions: int) -> Numbers:
    """Return the primes as an array that broadcasts with arrays of `dimensions` dimensions."""
    return _shaped(_PRIMES.get(), dimensions)


@lru_cache
def _shaped(primes: Primes, dimensions: int) -> Numbers:
    return np.array(primes, np.uint64).reshape(-1, *(1,) * (dimensions - 1))


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
    """Add element by element, with `other` divided by `divisor`."""
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
    """Add up along `axis`, each place times its weight; a single place has the sum of weights."""
    if numbers.shape[axis] == 1:
        return product(numbers, number(sum(weights), numbers.ndim))
    if any(weight != 1 for weight in weights):
        shape = [1] * numbers.ndim
        shape[axis] = -1
        numbers = product(numbers, np.array(weights, np.uint64).reshape(shape))
    return summed(numbers, axis, keepdims=True)


def number(value: float | Fraction, dimensions: int = 1) -> Numbers:
    """Return a rational number in both lanes, shaped for arrays of `dimensions` dimensions.

    Raises:
        ValueError: it is not finite.
        ZeroDivisionError: a prime divides its denominator.
    """
    return _number(_PRIMES.get(), value, dimensions)


@lru_cache(maxsize=4096)
def _number(primes: Primes, value: float | Fraction, dimensions: int) -> Numbers:
    lanes = _lanes(primes, Fraction(value))
    found = np.array(lanes, np.uint64).reshape(-1, *(1,) * (dimensions - 1))
    found.flags.writeable = False  # the cache returns it again
    return found


def share(value: float, dimensions: int = 1) -> Numbers:
    """Return the reciprocal of a number in both lanes, for arrays of `dimensions` dimensions.

    Raises:
        ZeroDivisionError: it is zero, or a multiple of a prime.
    """
    return _share(_PRIMES.get(), value, dimensions)


@lru_cache(maxsize=4096)
def _share(primes: Primes, value: float, dimensions: int) -> Numbers:
    return _number(primes, 1 / Fraction(value), dimensions)


def _lanes(primes: Primes, value: Fraction) -> tuple[int, ...]:
    if any(value.denominator % prime == 0 for prime in primes):
        raise ZeroDivisionError(f"{value} has no value modulo {primes}")
    return tuple(value.numerator * pow(value.denominator, -1, prime) % prime for prime in primes)


class Random:
    """Draws numbers modulo the current primes; deterministic for a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._primes = _PRIMES.get()
        self._generator = np.random.default_rng(seed)
        self._keyed: dict[tuple[str, int], Numbers] = {}
        self._pool: Numbers = np.zeros((2, 0), np.uint64)
        self._place = 0

    def draw(self, shape: Sequence[int]) -> Numbers:
        """Return new numbers, shape (2, *shape)."""
        count = prod(shape)
        if self._place + count > self._pool.shape[1]:
            size = max(count, 1 << 16)
            drawn = [self._generator.integers(1, prime, size, np.uint64) for prime in self._primes]
            self._pool, self._place = np.stack(drawn), 0
        found = self._pool[:, self._place : self._place + count]
        self._place += count
        return found.reshape(2, *shape)

    def key(self, name: str, count: int) -> Numbers:
        """Return `count` numbers that depend only on seed and `name`, shape (2, count)."""
        found = self._keyed.get((name, count))
        if found is None:
            digest = blake2b(f"{self._seed} {name}".encode(), digest_size=16).digest()
            generator = np.random.default_rng(list(digest))
            lanes = [generator.integers(1, prime, count, np.uint64) for prime in self._primes]
            found = np.stack(lanes)
            self._keyed[name, count] = found
        return found


_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def scrambled(digest: Numbers, key: Numbers) -> Numbers:
    """Return the values of a pseudo-random function, selected by `key`, at each digest.

    Both lanes are combined to one word, which is mixed as in splitmix64 (Steele, Lea and Flood
    2014), once for each lane.

    Args:
        digest: numbers, shape (2, ...).
        key: numbers, shape (2, ...), broadcast with the digest.
    """
    words = (digest[0] << _31) ^ digest[1]
    words = words * _ODD + ((key[0] << _31) ^ key[1])
    found = np.empty((2, *words.shape), np.uint64)
    for lane, prime in enumerate(_PRIMES.get()):
        words = words + _ODD
        mixed = (words ^ (words >> _30)) * _FIRST
        mixed = (mixed ^ (mixed >> _27)) * _SECOND
        found[lane] = (mixed ^ (mixed >> _31)) % np.uint64(prime)
    return found
