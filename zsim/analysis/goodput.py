"""Goodput: the share of time in which a training that fails and restarts makes progress.

Failures are a Poisson process. Steps wait while a checkpoint is written. A failure loses all work
since the last checkpoint, and a restart can fail too. These are the assumptions of

- Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17 (9);
- Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
  Future Generation Computer Systems 22 (3).
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from math import ceil, exp, expm1, fsum, inf, isinf, lgamma, log, log1p, sqrt
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from numpy.random import Generator

HALVINGS: Final = 200
"""Maximum halvings of the interval of a bisection; a double has no more digits after about 60."""

EXPONENT_MAX: Final = 700.0
"""Exponent beyond which a double overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """Failures of a training, and the times of a checkpoint and a restart, in seconds.

    Attributes:
        between_s: mean time between failures of the whole job; infinite if nothing fails.
        checkpoint_s: time for which steps wait for a checkpoint.
        restart_s: time from a failure until steps run again.
    """

    between_s: float
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if not self.between_s > 0 or not self.checkpoint_s > 0 or not self.restart_s >= 0:
            raise ValueError("interruptions: times must be more than 0")

    @property
    def young_s(self) -> float:
        """Young's interval between checkpoints: the first-order optimum."""
        return sqrt(2 * self.checkpoint_s * self.between_s)

    @property
    def daly_s(self) -> float:
        """Daly's interval between checkpoints: equation 37, an optimum of higher order."""
        if isinf(self.between_s):
            return inf
        half = self.checkpoint_s / (2 * self.between_s)
        if half >= 1:
            return self.between_s
        return self.young_s * (1 + sqrt(half) / 3 + half / 9) - self.checkpoint_s

    @property
    def optimal_s(self) -> float:
        """Interval between checkpoints that minimizes `stretch`, by bisection.

        The derivative of `stretch` has the sign of exp(x + d) (x - 1) + 1, where x is the interval
        and d the time of a checkpoint, both in units of the time between failures. This increases
        from a negative value at 0 to 1 at x = 1.
        """
        if isinf(self.between_s):
            return inf
        relative = self.checkpoint_s / self.between_s
        if relative > EXPONENT_MAX:
            return self.between_s
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            # expm1 keeps the digits of a checkpoint that is short
            is_short = expm1(middle + relative) * (middle - 1) + middle < 0
            low, high = (middle, high) if is_short else (low, middle)
        return high * self.between_s

    def stretch(self, interval_s: float) -> float:
        """Return the expected time over the time of the steps alone (Daly's equation 20).

        It is infinite if a checkpoint is expected never to be reached.
        """
        if isinf(self.between_s):
            return 1.0 if isinf(interval_s) else 1 + self.checkpoint_s / interval_s
        segment = (interval_s + self.checkpoint_s) / self.between_s
        restart = self.restart_s / self.between_s
        if segment + restart > EXPONENT_MAX:
            return inf
        return self.between_s * exp(restart) * expm1(segment) / interval_s

    def simulated_s(self, work_s: float, interval_s: float, draws: "Generator") -> float:
        """Return the time of one simulated training whose steps alone take `work_s`.

        The process has no memory, so after each failure the next one is drawn anew. The work ends
        with a checkpoint.
        """
        if isinf(self.between_s):
            count = 0 if isinf(interval_s) else ceil(work_s / interval_s)
            return work_s + count * self.checkpoint_s
        segment_s = interval_s + self.checkpoint_s
        full = max(ceil(work_s / interval_s) - 1, 0)
        last_s = work_s - full * interval_s + self.checkpoint_s
        passed_s, done = 0.0, 0
        while True:
            runs_s = draws.exponential(self.between_s)
            left_s = (full - done) * segment_s + last_s
            if runs_s >= left_s:
                return passed_s + left_s
            passed_s += runs_s
            done += min(int(runs_s // segment_s), full - done)
            while (fails_s := draws.exponential(self.between_s)) < self.restart_s:
                passed_s += fails_s
            passed_s += self.restart_s


def chance_of_enough(nodes: int, spares: int, down: float) -> float:
    """Return the probability that `nodes` of `nodes + spares` nodes work.

    Each node is down, independently, for the share `down` of the time.
    """
    if not 0 < down < 1:
        return float(down <= 0)
    total, up, out = nodes + spares, log1p(-down), log(down)
    ways = (
        lgamma(total + 1) - lgamma(broken + 1) - lgamma(total - broken + 1)
        for broken in range(spares + 1)
    )
    chances = (exp(each + broken * out + (total - broken) * up) for broken, each in enumerate(ways))
    return min(fsum(chances), 1.0)


def share_down(failures_per_s: float, repair_s: float) -> float:
    """Return the share of time for which a node is down, if each failure needs a repair."""
    return failures_per_s * repair_s / (1 + failures_per_s * repair_s)


def least_spares(nodes: int, down: float, target: float, *, most: int) -> int | None:
    """Return the least number of spare nodes with which `nodes` work for `target` of the time.

    Return None if `most` spares do not suffice.
    """
    chance = partial(chance_of_enough, nodes, down=down)
    found = bisect_left(range(most + 1), target, key=chance)
    return found if found <= most else None
