"""PyTorch's caching allocator with default settings and no journal, one model segment a call.

It makes the same decisions as `CachingAllocator`; a property test compares both. Blocks are handed
out without names, and the tensors of a segment are served in one loop: in a pipeline of many
micro-batches they dominate the simulation time.
"""

from bisect import bisect_left, insort
from collections.abc import MutableMapping, Sequence

from zsim.memory.caching import CachingAllocator
from zsim.memory.memory_block import ADDRESS_BITS, ADDRESS_MASK, Block
from zsim.memory.settings import BLOCK_BYTES, SMALL_MAX_BYTES

Turn = tuple[int, int, int, int, int]
"""An allocation or free in a segment: number of its buffer, number of the tensor's key, bytes (a
free if not positive), bytes rounded up, and the least key of a free block that is large enough."""

Table = MutableMapping[int, Block]
"""Blocks of a buffer's tensors, by key."""


def turn(number: int, key: int, size: int) -> Turn:
    """Return a turn that allocates `size` bytes, or frees the tensor if `size` is not positive."""
    wanted = size + BLOCK_BYTES - 1 & -BLOCK_BYTES if size > 0 else size
    return number, key, size, wanted, max(wanted, 0) << ADDRESS_BITS


class QuickAllocator(CachingAllocator):
    """A `CachingAllocator` with default settings and no journal that returns unnamed blocks."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes=capacity_bytes, journals=False)

    def take(self, size_bytes: int, stream: str) -> Block | None:
        """Return a block of a stream, or None if out of memory."""
        table: dict[int, Block] = {}
        self.serve((turn(0, 0, size_bytes),), (table,), stream)
        return table.get(0)

    def give(self, block: Block) -> None:
        """Free a block."""
        self.allocated_bytes -= block[1]
        self._give_back(block)

    def hold(self, block: Block, stream: str) -> None:
        """Free a block once `stream`, which uses it too, has reached this point."""
        self.allocated_bytes -= block[1]
        self._waiting.setdefault(stream, []).append([block])

    def serve(  # noqa: PLR0915  (calls would double the time)
        self, turns: Sequence[Turn], tables: Sequence[Table], stream: str
    ) -> int:
        """Serve turns; return the bytes of the turn that ran out of memory, 0 if none did.

        `tables` holds the blocks of each buffer, by the buffer's number in the turn.
        """
        size_at, start_of = self._size_at, self._start_of
        small = self._small.get(stream) or self._open(stream, small=True)
        large = self._large.get(stream) or self._open(stream, small=False)
        allocated, peak = self.allocated_bytes, self.peak_allocated_bytes
        refused = 0
        for number, name, asked, wanted, least in turns:
            if wanted > 0:
                if self._over:
                    self._give_back_what_is_over()
                pool = small if wanted <= SMALL_MAX_BYTES else large
                keys = pool.keys
                place = bisect_left(keys, least)
                if place == len(keys) and (place := self._obtain(pool, wanted, place)) < 0:
                    refused = asked
                    break
                key = keys.pop(place)
                taken = key >> ADDRESS_BITS
                address = key & ADDRESS_MASK
                del size_at[address]
                rest = taken - wanted
                if rest > pool.kept_bytes:
                    after = address + wanted
                    size_at[after] = rest
                    start_of[after + rest] = after
                    insort(keys, rest << ADDRESS_BITS | after, 0, place)
                    taken = wanted
                else:
                    del start_of[address + taken]
                allocated += taken
                if allocated > peak:  # noqa: PLR1730  (`max` takes twice as long)
                    peak = allocated
                table = tables[number]
                given = table.get(name)
                table[name] = address, taken, pool, asked
            else:
                given = tables[number].pop(name, None)
            if given is None:
                continue
            address, size, pool, _ = given
            allocated -= size
            keys, end = pool.keys, address + size
            if (following := size_at.pop(end, None)) is not None:
                del keys[bisect_left(keys, following << ADDRESS_BITS | end)]
                end += following
            if (before := start_of.pop(address, None)) is not None:
                del keys[bisect_left(keys, address - before << ADDRESS_BITS | before)]
                address = before
            size_at[address] = end - address
            start_of[end] = address
            insort(keys, end - address << ADDRESS_BITS | address)
        self.allocated_bytes, self.peak_allocated_bytes = allocated, peak
        return refused
