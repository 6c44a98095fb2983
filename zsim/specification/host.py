"""Numbers that hosts count in training: updates so far, and those of two options.

With updates that are delayed after a warm-up, the steps of it that are left; with fp16, the dynamic
loss scale.

The loss scale is that of Micikevicius et al. 2018 ("Mixed precision training", section 3.2) with
the constants of the strategy: after an overflow it is backed off, and after so many steps without
one it grows.
"""

from dataclasses import dataclass, replace

from zsim.strategy.train import LossScale

HIGHEST = float(2**53)
"""Whole numbers beyond this are not exact in a float: where hosts stop counting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostState:
    """The numbers of a host between two steps.

    `since` counts steps since the last overflow, `warm_up` those that are left before updates are
    delayed.
    """

    updates: float
    scale: float
    since: float
    warm_up: float = 0.0

    def after(self, law: LossScale | None, *, overflows: bool) -> "HostState":
        """Return the state after one step; without a law the scale stays."""
        warm_up = max(self.warm_up - 1, 0.0)
        if overflows:
            scale = self.scale if law is None else max(self.scale * law.backoff, law.minimum)
            return replace(self, scale=scale, since=0.0, warm_up=warm_up)
        since, scale = min(self.since + 1, HIGHEST), self.scale
        if law is not None and since % law.interval == 0:
            scale = min(scale * law.growth, HIGHEST)
        updates = min(self.updates + 1, HIGHEST)
        return HostState(updates=updates, scale=scale, since=since, warm_up=warm_up)
