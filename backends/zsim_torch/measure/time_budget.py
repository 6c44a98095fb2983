"""Seconds that a measurement has, and how often it has repeated what it measures in them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

Clock = Callable[[], float]
"""Seconds since some moment."""


class Repeats(NamedTuple):
    """Numbers of times that something was measured, and that it should be."""

    what: str
    done: int
    wanted: int


@dataclass(slots=True)
class TimeBudget:
    """Seconds by a clock, which end at `end_s`; `repeats` is noted by those who spend them.

    Who spends them does once what has to be done, however late it is, and again until they end.
    """

    clock: Clock
    end_s: float
    repeats: list[Repeats] = field(default_factory=list[Repeats])

    @classmethod
    def of(cls, seconds: float, clock: Clock = time.monotonic) -> Self:
        """Return so many seconds from now on."""
        return cls(clock, clock() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds that are left; less than 0 after the end."""
        return self.end_s - self.clock()

    @property
    def is_over(self) -> bool:
        """Return whether none are left."""
        return self.left_s <= 0

    def note(self, what: str, done: int, wanted: int) -> None:
        """Note how often something was measured."""
        self.repeats.append(Repeats(what, done, wanted))
