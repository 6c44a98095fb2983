"""Makes hidden faults show: memory that is not valid holds no numbers, and ranks run late."""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from zsim.operation import AllGather, AllReduce, Broadcast, Communication, Receive, ReduceScatter
from zsim_torch.memory import spoil

DELAY_S_MAX: Final = 2e-3
"""A late rank is at most this late at one operation; a collective on loopback takes about 1 ms."""

DELAYED_SHARE: Final = 0.1
"""Of all operations, how many are delayed."""


@dataclass(slots=True)
class Poison:
    """Does nothing without a generator."""

    generator: np.random.Generator | None = None

    def delay(self) -> None:
        """Now and then this rank is late."""
        if self.generator is not None and self.generator.random() < DELAYED_SHARE:
            time.sleep(self.generator.uniform(0.0, DELAY_S_MAX))

    def not_yet_valid(
        self, operation: Communication, source: torch.Tensor | None, target: torch.Tensor
    ) -> None:
        """Spoil the target of a collective in flight, but for what is its source too."""
        if self.generator is None:
            return
        match operation:
            case AllGather() | ReduceScatter() if source is not None and _alias(source, target):
                start = source.storage_offset() - target.storage_offset()
                if isinstance(operation, AllGather):
                    spoil(target[:start])
                    spoil(target[start + source.numel() :])
            case AllGather() | ReduceScatter() | Receive():
                spoil(target)
            case _:
                # An all-reduce and a broadcast work in place.
                assert isinstance(operation, AllReduce | Broadcast)


def _alias(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
