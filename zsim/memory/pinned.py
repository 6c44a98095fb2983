"""PyTorch's caching allocator of pinned host memory: which blocks it allocates and caches.

A request is rounded up to a power of two, and gets a free block of that size if there is one. A
freed block is cached, and never split. Sizes above a threshold are exact; blocks that are not
cached are returned at once. A block used by streams becomes free when they have reached the point
of its free. The cache is not released to serve a request: if the host has no memory left, it fails.

Follows CachingHostAllocatorImpl in ATen/core/CachingHostAllocator.h of PyTorch 2.13.0. The order in
which blocks of one size are reused does not matter here: they are interchangeable.
"""

from collections import Counter
from collections.abc import Hashable

from zsim.memory.caching import UNLIMITED
from zsim.memory.settings import AllocatorError, PinnedSettings, pinned_bytes


class PinnedAllocator:
    """Pinned memory of one rank, of at most `capacity_bytes`, without a limit if None.

    Attributes:
        reserved_bytes: bytes allocated from the host and not returned.
        peak_allocated_bytes: the most requested bytes live at once, without blocks waiting for
            streams.
        device_frees, synchronizations: 0, because the cache is not released to serve a request.
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
        """Serve a request; return True unless out of memory. All streams share the blocks.

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
        """Return the bytes to allocate from the host for a request that no free block serves."""
        return pinned_bytes(size_bytes, self.settings)

    def use(self, name: Hashable, stream: str) -> None:
        """Record that a stream uses a live block: a copy that the host does not wait for."""
        self._uses.setdefault(name, set()).add(stream)

    def free(self, name: Hashable) -> None:
        """Free a live block: now, or when the streams that use it have reached this point.

        Raises:
            AllocatorError: `name` is not live.
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
        """Record that a stream has reached the frees of the blocks that it uses."""
        still: list[tuple[set[str], int]] = []
        for uses, block in self._waiting:
            uses.discard(stream)
            if uses:
                still.append((uses, block))
            else:
                self._keep(block)
        self._waiting = still

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return an empty set: the host never waits to release memory."""
        return frozenset()

    def _keep(self, block: int) -> None:
        limit = self.settings.max_cached_bytes
        if limit is not None and block > limit:
            self.reserved_bytes -= block
        else:
            self._free[block] += 1
