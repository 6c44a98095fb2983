"""Numbers that hosts count in training: updates, the loss scale and the warm-up.

Warm-up steps are counted for delayed updates.

The dynamic loss scale of fp16 follows Micikevicius et al. 2018 ("Mixed precision training",
section 3.2) with the constants of the strategy: it shrinks after an overflow and grows after a
number of steps without one.
"""

from dataclasses import dataclass, replace

from zsim.strategy.train import LossScale

HIGHEST = float(2**53)
"""Hosts stop counting here: larger whole numbers are not exact in a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The numbers of a host between two steps.

    `since` counts steps since the last overflow, `warm_up` the remaining steps before updates are
    delayed.
    """

    updates: float
    scale: float
    since: float
    warm_up: float = 0.0

    def after(self, law: LossScale | None, *, overflows: bool) -> "HostState":
        """Return the state after one step; without a `law` the loss scale is constant."""
        warm_up = max(self.warm_up - 1, 0.0)
        if overflows:
            scale = self.scale if law is None else max(self.scale * law.backoff, law.minimum)
            return replace(self, scale=scale, since=0.0, warm_up=warm_up)
        since, scale = min(self.since + 1, HIGHEST), self.scale
        if law is not None and since % law.interval == 0:
            scale = min(scale * law.growth, HIGHEST)
        updates = min(self.updates + 1, HIGHEST)
        return HostState(updates=updates, scale=scale, since=since, warm_up=warm_up)
