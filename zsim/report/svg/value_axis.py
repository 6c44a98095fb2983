"""A numeric axis: round ticks, and the mapping from values to positions."""

from dataclasses import dataclass
from math import ceil, floor, log10

TICKS_MAX = 6


@dataclass(frozen=True, slots=True)
class ValueAxis:
    """An axis from `low` to `high` with ticks."""

    ticks: tuple[float, ...]
    low: float
    high: float
    is_logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the position of `value` as a share: 0 at `low`, 1 at `high`."""
        low, high = self.low, self.high
        if self.is_logarithmic:
            value, low, high = log10(value), log10(low), log10(high)
        return (value - low) / (high - low)


def linear(least: float, most: float, *, ticks: int = TICKS_MAX, tight: bool = False) -> ValueAxis:
    """Return an axis with at most about `ticks` round ticks.

    The axis ends at ticks around `least` and `most`, or with `tight` exactly at these values.
    """
    if most <= least:
        most = least + (abs(least) or 1.0)
    steps = (factor * 10.0**power for power in range(-15, 18) for factor in (1, 2, 5))
    step = next(step for step in steps if most - least <= ticks * step)
    first, last = floor(least / step + 1e-9), ceil(most / step - 1e-9)
    every = tuple(round(step * at, 15) for at in range(first, last + 1))
    if not tight:
        return ValueAxis(every, every[0], every[-1])
    return ValueAxis(tuple(each for each in every if least <= each <= most), least, most)


def logarithmic(least: float, most: float) -> ValueAxis:
    """Return a logarithmic axis whose ticks are powers of ten."""
    powers = range(floor(log10(least)), max(ceil(log10(most)), floor(log10(least)) + 1) + 1)
    ticks = tuple(10.0**power for power in powers)
    return ValueAxis(ticks, ticks[0], ticks[-1], is_logarithmic=True)
