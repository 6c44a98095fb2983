"""The caching allocator with `expandable_segments`: one address range, mapped page by page.

Each pool of each stream has an address range larger than the device. When no cached block serves a
request, pages are mapped at the lowest address where consecutive free blocks and unmapped pages are
large enough. Wholly free pages can be unmapped one by one, so fragmentation is low.

Follows c10/cuda/CUDACachingAllocator.cpp of PyTorch; compared with PyTorch 2.13.0.
"""

from bisect import bisect_left, insort

from zsim.memory.caching import UNLIMITED, CachingAllocator
from zsim.memory.memory_block import ADDRESS_BITS, ADDRESS_MASK, BlockPool
from zsim.memory.settings import LARGE_SEGMENT_BYTES, SMALL_SEGMENT_BYTES, AllocatorSettings

RANGE_MAX_BYTES = 1 << 44
"""The address range in bytes on a device without a limit."""


class ExpandableAllocator(CachingAllocator):
    """A `CachingAllocator` whose segments expand."""

    expandable = True

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        journals: bool = True,
    ) -> None:
        super().__init__(
            capacity_bytes=capacity_bytes,
            settings=settings or AllocatorSettings(expandable_segments=True),
            journals=journals,
        )
        self._next_address = 0
        # Runs of unmapped pages: address to size, address of the end to address, and the sorted
        # addresses of each pool.
        self._unmapped: dict[int, int] = {}
        self._unmapped_start_of: dict[int, int] = {}
        self._ranges: dict[BlockPool, list[int]] = {}
        self._synchronized: set[str] = set()

    def synchronized_streams(self) -> frozenset[str]:
        """Return the streams whose pages were unmapped since the last call.

        `ExpandableSegment::unmapHandles` waits for the segment's own stream, not for the device
        (`cudaStreamSynchronize`).
        """
        found = frozenset(self._synchronized)
        self._synchronized.clear()
        return found

    def free_places(self) -> frozenset[tuple[int, int]]:
        """Return the addresses and bytes of all free blocks and runs of unmapped pages."""
        unmapped = ((address, -size) for address, size in self._unmapped.items())
        return super().free_places().union(unmapped)

    def growth_bytes(self, size_bytes: int) -> int:
        """Return the bytes to map pages for if no free block serves a request."""
        return size_bytes

    def _choose(self, pool: BlockPool, wanted: int, place: int) -> int:
        """Return the place of the best fit; unmapped pages after a block count as part of it."""
        keys = pool.keys
        if place == len(keys):
            return -1
        reach = self._reach(keys[place])
        while place + 1 < len(keys) and (following := self._reach(keys[place + 1])) < reach:
            place, reach = place + 1, following
        return place

    def _reach(self, key: int) -> int:
        size = key >> ADDRESS_BITS
        return size + self._unmapped.get((key & ADDRESS_MASK) + size, 0)

    def _grow(self, pool: BlockPool, wanted: int) -> int:
        """Map pages at the lowest run that is large enough; return the block's place, or -1."""
        if wanted > self._range_bytes:
            return -1
        address = self._row(pool, wanted)
        if address in self._unmapped:
            mapped = self._map(pool, address, min(wanted, self._unmapped[address]))
            if mapped is None:
                return -1
            address = mapped
        while self._size_at[address] < wanted:
            size = self._size_at[address]
            following = self._unmapped[address + size]
            if self._map(pool, address + size, min(wanted - size, following)) is None:
                return -1
        return bisect_left(pool.keys, self._size_at[address] << ADDRESS_BITS | address)

    def _row(self, pool: BlockPool, wanted: int) -> int:
        """Return the lowest address of consecutive free blocks and unmapped pages that suffice.

        A row starts with unmapped pages, or with the block before them. Without one, reserve a
        range.
        """
        for unmapped in self._ranges.get(pool, ()):
            start = end = self._start_of.get(unmapped, unmapped)
            while end - start < wanted:
                size = self._size_at.get(end) or self._unmapped.get(end)
                if size is None:
                    break
                end += size
            if end - start >= wanted:
                return start
        return self._open_range(pool)

    @property
    def _range_bytes(self) -> int:
        capacity = self.capacity_bytes
        return RANGE_MAX_BYTES if capacity == UNLIMITED else capacity + capacity // 8

    def _open_range(self, pool: BlockPool) -> int:
        """Reserve 9/8 of the device as unmapped addresses, in whole pages; return the start."""
        page = _page(pool)
        size = -(-self._range_bytes // page) * page
        address = -(-self._next_address // page) * page + page
        self._next_address = address + size
        self._segments[address] = size
        self._add_unmapped(pool, address, size)
        return address

    def _map(self, pool: BlockPool, address: int, size: int) -> int | None:
        """Map pages for `size` bytes from `address`; return their block, None if out of memory."""
        page = _page(pool)
        size = -(-size // page) * page
        if self.reserved_bytes + size > self.capacity_bytes:
            return None
        rest = self._unmapped[address] - size
        self._remove_unmapped(pool, address)
        if rest:
            self._add_unmapped(pool, address + size, rest)
        self._take(size, 0, small=pool.small)
        end = address + size
        following = self._size_at.pop(end, None)
        if following is not None:
            pool.remove(end, following)
            end += following
        before = self._start_of.pop(address, None)
        if before is not None:
            pool.remove(before, address - before)
            address = before
        self._add_free(pool, address, end - address)
        return address

    def _return_free(self, pool: BlockPool) -> None:
        """Unmap every wholly free page of a pool."""
        page = _page(pool)
        for address, size in pool.blocks():
            first, last = -(-address // page) * page, (address + size) // page * page
            if first >= last:
                continue
            pool.remove(address, size)
            del self._size_at[address], self._start_of[address + size]
            if address < first:
                self._add_free(pool, address, first - address)
            if last < address + size:
                self._add_free(pool, last, address + size - last)
            self._take(first - last, 0, small=pool.small)
            self._unmap(pool, first, last)
            self._synchronized.add(pool.stream)

    def _unmap(self, pool: BlockPool, first: int, last: int) -> None:
        if last in self._unmapped:
            following = self._unmapped[last]
            self._remove_unmapped(pool, last)
            last += following
        before = self._unmapped_start_of.get(first)
        if before is not None:
            self._remove_unmapped(pool, before)
            first = before
        if self._segments.get(first) == last - first:
            del self._segments[first]
        else:
            self._add_unmapped(pool, first, last - first)

    def _add_free(self, pool: BlockPool, address: int, size: int) -> None:
        pool.add(address, size)
        self._size_at[address] = size
        self._start_of[address + size] = address

    def _add_unmapped(self, pool: BlockPool, address: int, size: int) -> None:
        self._unmapped[address] = size
        self._unmapped_start_of[address + size] = address
        insort(self._ranges.setdefault(pool, []), address)

    def _remove_unmapped(self, pool: BlockPool, address: int) -> None:
        size = self._unmapped.pop(address)
        del self._unmapped_start_of[address + size]
        self._ranges[pool].remove(address)


def _page(pool: BlockPool) -> int:
    return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
