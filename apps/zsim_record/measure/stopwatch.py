"""Time an action on a device, repeated often enough to be measurable."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

SEEN_S: Final = 2e-4
"""Minimum total seconds of the repetitions, long compared to a launch and the clock's error."""

CALLS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """A clock that waits for all operations issued to the device."""

    device: torch.device

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def once_s(self, action: Callable[[], object], calls: int = 1) -> float:
        """Return the mean seconds of `action` over `calls` consecutive calls."""
        self.settle()
        start = time.perf_counter()
        for _ in range(calls):
            action()
        self.settle()
        return (time.perf_counter() - start) / calls

    def seen_s(self, action: Callable[[], object]) -> float:
        """Return the mean seconds of `action`: one warm-up call, then as many as needed."""
        first = self.once_s(action)
        calls = max(1, min(CALLS_MAX, round(SEEN_S / max(first, 1e-7))))
        return self.once_s(action, calls)
