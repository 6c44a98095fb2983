"""Seconds of an action on a device, as often as it takes to see them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

SEEN_S: Final = 2e-4
"""An action is repeated until so long has passed: the clock and a launch are short beside it."""

CALLS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """The clock of a device: what was issued to it is waited for."""

    device: torch.device

    def settle(self) -> None:
        """Wait until the device has nothing to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once_s(self, action: Callable[[], object], calls: int = 1) -> float:
        """Return the mean seconds of `action` in so many calls, one after the other."""
        self.settle()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        self.settle()
        return (time.perf_counter() - start) / calls

    def seen_s(self, action: Callable[[], object]) -> float:
        """Return the mean seconds of `action`, called once to warm up, then as often as needed."""
        first = self.once_s(action)
        calls = max(1, min(CALLS_MAX, round(SEEN_S / max(first, 1e-7))))
        return self.once_s(action, calls)
