"""Memory that holds notes about numbers in place of the numbers, such as `marks`."""

import numpy as np
from numpy.typing import NDArray

Notes = NDArray[np.uint8]
"""One row per element."""


class NotedMemory:
    """The memory of `Values` that hold notes. It does not detect reads at the wrong time."""

    def window(self, memory: Notes, start: int, size: int) -> Notes:
        """Return `size` elements of `memory` from `start` on."""
        return memory[start : start + size]

    def invalidate(self, window: Notes) -> None:
        """Do nothing."""

    def is_invalidated(self, window: Notes) -> bool:
        """Return False: spoiled memory is not tracked."""
        del window
        return False

    def taken(self, window: Notes) -> Notes:
        """Return a copy of `window`."""
        return window.copy()

    def same(self, one: Notes, other: Notes) -> bool:
        """Return True: changes are not tracked."""
        del one, other
        return True

    def store(self, window: Notes, value: Notes) -> None:
        """Store `value` in `window`."""
        window[:] = value
