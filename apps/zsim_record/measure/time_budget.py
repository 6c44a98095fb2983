"""The time budget of a measurement, and its number of repetitions."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""


class Repeats(NamedTuple):
    """How often something was measured, and how often it should have been."""

    what: str
    done: int
    wanted: int


@dataclass(slots=True)
class TimeBudget:
    """A budget that ends at `end_s` on a clock; users add their `repeats`.

    Users always run the required measurements, even after the end, and repeat them until the end.
    """

    clock: Clock
    end_s: float
    repeats: list[Repeats] = field(default_factory=list[Repeats])

    @classmethod
    def of(cls, seconds: float, clock: Clock = time.monotonic) -> Self:
        """Return a budget of `seconds` from now on."""
        return cls(clock, clock() + seconds)

    @property
    def left_s(self) -> float:
        """Return the seconds left; negative after the end."""
        return self.end_s - self.clock()

    @property
    def is_over(self) -> bool:
        """Return True if no seconds are left."""
        return self.left_s <= 0

    def note(self, what: str, done: int, wanted: int) -> None:
        """Record how often something was measured."""
        self.repeats.append(Repeats(what, done, wanted))
