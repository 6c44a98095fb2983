"""Handles for the blocks of a named-block allocator, with the interface of `QuickAllocator`."""

from collections.abc import MutableMapping, Sequence

from zsim.memory.caching import CachingAllocator
from zsim.memory.pinned import PinnedAllocator
from zsim.memory.quick_caching import Turn


class NamedBlocks:
    """Blocks of one allocator; each handle is the number that names the block there."""

    def __init__(self, allocator: CachingAllocator | PinnedAllocator) -> None:
        self._allocator = allocator
        self._count = 0

    def take(self, size_bytes: int, stream: str) -> int | None:
        """Return a block of a stream, or None if out of memory."""
        self._count += 1
        return self._count if self._allocator.allocate(self._count, size_bytes, stream) else None

    def give(self, block: int) -> None:
        """Free a block."""
        self._allocator.free(block)

    def hold(self, block: int, stream: str) -> None:
        """Free a block once `stream`, which uses it too, has reached this point."""
        self._allocator.use(block, stream)
        self._allocator.free(block)

    def serve(
        self,
        turns: Sequence[Turn],
        tables: Sequence[MutableMapping[int, int]],
        stream: str,
    ) -> int:
        """Serve `turns` like `QuickAllocator.serve`; return the bytes of the failed turn, or 0."""
        for number, key, size, _, _ in turns:
            table = tables[number]
            if size > 0:
                block = self.take(size, stream)
                if block is None:
                    return size
                if key in table:
                    self.give(table[key])
                table[key] = block
            elif (known := table.pop(key, None)) is not None:
                self.give(known)
        return 0
