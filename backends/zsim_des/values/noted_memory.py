"""Memory of notes about numbers, instead of the numbers: what marks and other notes share."""

import numpy as np
from numpy.typing import NDArray

Notes = NDArray[np.uint8]
"""A row for each element."""


class NotedMemory:
    """The memory of `Values` that carry notes: whether it is read in time is for others to say."""

    def window(self, memory: Notes, start: int, size: int) -> Notes:
        """Return elements `start` on of `memory`."""
        return memory[start : start + size]

    def spoil(self, window: Notes) -> None:
        """Do nothing."""

    def is_spoiled(self, window: Notes) -> bool:
        """Return false: it is not known."""
        del window
        return False

    def taken(self, window: Notes) -> Notes:
        """Return a copy."""
        return window.copy()

    def same(self, one: Notes, other: Notes) -> bool:
        """Return true: it is not known."""
        del one, other
        return True

    def store(self, window: Notes, value: Notes) -> None:
        """`window` becomes `value`."""
        window[:] = value
