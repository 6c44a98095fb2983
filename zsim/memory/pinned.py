"""PyTorch's caching allocator of pinned host memory: which blocks it takes, and keeps.

A request is rounded up to a power of two, and takes a free block of that size if there is one; a
freed block is kept, and never split. Sizes above a threshold are exact, and those that are not
cached go back at once. A block that streams use is free when they have come to where they were at
its free. Nothing is given back to serve a request: if the host has no more, it fails.

Written after CachingHostAllocatorImpl in ATen/core/CachingHostAllocator.h of PyTorch 2.13.0. The
order in which blocks of one size are taken again does not matter here: they are alike.
"""

from collections import Counter
from collections.abc import Hashable

from zsim.memory.caching import UNLIMITED
from zsim.memory.settings import AllocatorError, PinnedSettings, pinned_bytes


class PinnedAllocator:
    """Pinned memory of one rank, of `capacity_bytes` at most, without a limit if None.

    Attributes:
        reserved_bytes: taken from the host and not returned.
        peak_allocated_bytes: the most that was asked for at a time, without what waits for streams.
        device_frees, synchronizations: 0, since nothing is given back to serve a request.
    """

    def __init__(
        self, *, capacity_bytes: int | None = None, settings: PinnedSettings | None = None
    ) -> None:
        self.settings = settings or PinnedSettings()
        self.capacity_bytes = UNLIMITED if capacity_bytes is None else capacity_bytes
        self.reserved_bytes = self.peak_allocated_bytes = 0
        self.device_frees = self.synchronizations = 0
        self._allocated_bytes = 0
        self._live: dict[Hashable, int] = {}
        self._uses: dict[Hashable, set[str]] = {}
        self._free: Counter[int] = Counter()
        self._waiting: list[tuple[set[str], int]] = []

    def allocate(self, name: Hashable, size_bytes: int, stream: str) -> bool:
        """Serve a request; return whether there was memory. All streams share the blocks.

        Raises:
            AllocatorError: `name` is live already, or the size is negative.
        """
        del stream
        if name in self._live or size_bytes < 0:
            raise AllocatorError(f"{name}: is live already, or of {size_bytes} bytes")
        block = pinned_bytes(size_bytes, self.settings)
        if self._free[block]:
            self._free[block] -= 1
        elif self.reserved_bytes + block > self.capacity_bytes:
            return False
        else:
            self.reserved_bytes += block
        self._live[name] = size_bytes
        self._allocated_bytes += size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self._allocated_bytes)
        return True

    def growth_bytes(self, size_bytes: int) -> int:
        """Return what the host is asked for when nothing that is free serves so many bytes."""
        return pinned_bytes(size_bytes, self.settings)

    def use(self, name: Hashable, stream: str) -> None:
        """Note that a stream uses a live block: a copy that is not waited for."""
        self._uses.setdefault(name, set()).add(stream)

    def free(self, name: Hashable) -> None:
        """Free a live block: now, or when the streams that use it are there.

        Raises:
            AllocatorError: it is not live.
        """
        if name not in self._live:
            raise AllocatorError(f"{name}: is not live")
        size = self._live.pop(name)
        self._allocated_bytes -= size
        block, uses = pinned_bytes(size, self.settings), self._uses.pop(name, set())
        if uses:
            self._waiting.append((uses, block))
        else:
            self._keep(block)

    def finish(self, stream: str) -> None:
        """Note that a stream has come to where it was at the frees of what it uses."""
        still: list[tuple[set[str], int]] = []
        for uses, block in self._waiting:
            uses.discard(stream)
            if uses:
                still.append((uses, block))
            else:
                self._keep(block)
        self._waiting = still

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return none: the host never waits to give memory back."""
        return frozenset()

    def _keep(self, block: int) -> None:
        limit = self.settings.max_cached_bytes
        if limit is not None and block > limit:
            self.reserved_bytes -= block
        else:
            self._free[block] += 1
