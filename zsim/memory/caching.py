"""PyTorch's caching allocator on one device: how it finds, splits, merges and caches blocks.

Memory is allocated from the device in segments, and cached when it is freed. A request gets the
smallest free block that is large enough, from the pool of its stream and size (up to 1 MiB, or
larger). Of equal blocks, it gets the one in the oldest segment, at the lowest address. The
remainder is split off. A free block is merged with free neighbors at once. A block used by other
streams becomes free at the first request after those streams have reached the point of its free. If
the device has no memory left, segments that are wholly free are returned to it, and the request is
retried.

Follows c10/cuda/CUDACachingAllocator.cpp of PyTorch; compared with PyTorch 2.13.0. (Before 2.13,
the lowest address decides, regardless of the segment's age: PR 183591.) Not modeled: private pools
of CUDA graphs, and device memory used outside the allocator.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from itertools import chain

from zsim.memory.journal import Journal
from zsim.memory.memory_block import (
    ADDRESS_BITS,
    ADDRESS_MASK,
    Block,
    BlockPiece,
    BlockPool,
    BlockState,
)
from zsim.memory.settings import (
    BLOCK_BYTES,
    OWN_SEGMENT_ROUNDING_BYTES,
    SMALL_MAX_BYTES,
    AllocatorError,
    AllocatorSettings,
    rounded,
    segment_bytes,
)

UNLIMITED = 1 << 62
"""Bytes of a device without a limit."""


class CachingAllocator:
    """One device's memory of `capacity_bytes`, without a limit if None.

    Attributes:
        reserved_bytes: bytes allocated from the device and not returned.
        peak_reserved_bytes: the largest value of `reserved_bytes` so far.
        allocated_bytes: bytes in live blocks.
        peak_allocated_bytes: the largest value of `allocated_bytes` so far:
            `torch.cuda.max_memory_allocated`.
        journal: record of all changes; empty without `journals`.
        retries: number of times the cache was released because the device had no memory left.
        ooms: requests that failed even then.
        synchronizations: number of times the host waited for all streams before releasing the
            cache.
        device_allocations, device_frees: segments allocated from the device, and returned.
    """

    expandable = False

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        journals: bool = True,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = UNLIMITED if capacity_bytes is None else capacity_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.retries = self.ooms = self.synchronizations = 0
        self.device_allocations = self.device_frees = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.journal = Journal(self.expandable)
        self._changes = self.journal.changes if journals else None
        self._divisions = self.settings.roundup_power2_divisions
        self._split_max = self.settings.max_split_bytes or UNLIMITED
        self._collects = self.settings.garbage_collection_threshold > 0
        unsplit = self.settings.max_split_bytes is not None
        self._picky = self.expandable or unsplit or self._collects
        self._small: dict[str, BlockPool] = {}
        self._large: dict[str, BlockPool] = {}
        self._live: dict[Hashable, Block | None] = {}
        # Free blocks: address to size, and address of the end to address.
        self._size_at: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        # Number of searches for a large block; its value when a segment became wholly free.
        self._searches = 0
        self._free_since: dict[int, int] = {}
        self._next_address = OWN_SEGMENT_ROUNDING_BYTES
        # Streams that use a live block; blocks that wait for streams, with one entry per stream.
        self._uses: dict[Hashable, dict[str, None]] = {}
        self._waiting: dict[str, list[list[Block]]] = {}
        self._over: list[list[Block]] = []

    def allocate(self, name: Hashable, size_bytes: int, stream: str) -> bool:
        """Serve a request on a stream; return True unless out of memory. 0 bytes allocate nothing.

        Raises:
            AllocatorError: `name` is live already, or the size is negative.
        """
        if size_bytes <= 0 or name in self._live:
            return self._allocate_nothing(name, size_bytes)
        if self._over:
            self._give_back_what_is_over()
        if self._divisions:
            wanted = rounded(size_bytes, self._divisions)
        else:
            wanted = size_bytes + BLOCK_BYTES - 1 & -BLOCK_BYTES
        if wanted <= SMALL_MAX_BYTES:
            pool = self._small.get(stream) or self._open(stream, small=True)
        else:
            pool = self._large.get(stream) or self._open(stream, small=False)
        keys = pool.keys
        place = bisect_left(keys, wanted << ADDRESS_BITS)
        if place == len(keys) or self._picky:
            place = self._obtain(pool, wanted, place)
            if place < 0:
                return False
        key = keys[place]
        del keys[place]
        size = key >> ADDRESS_BITS
        address = key & ADDRESS_MASK
        del self._size_at[address]
        rest = size - wanted
        if rest > pool.kept_bytes and wanted < self._split_max:
            after = address + wanted
            self._size_at[after] = rest
            self._start_of[after + rest] = after
            insort(keys, rest << ADDRESS_BITS | after, 0, place)
            taken, parts = wanted, 1
        else:
            del self._start_of[address + size]
            taken, parts = size, 0
        self._live[name] = (address, taken, pool, size_bytes)
        self.allocated_bytes = allocated = self.allocated_bytes + taken
        if allocated > self.peak_allocated_bytes:  # noqa: PLR1730  (`max` takes twice as long)
            self.peak_allocated_bytes = allocated
        if self._changes is not None:
            is_whole = self._segments.get(address) == size
            left_bytes, left_parts = (size - taken, parts) if is_whole else (-taken, parts - 1)
            self._changes.append((taken, size_bytes, left_bytes, left_parts))
        return True

    def growth_bytes(self, size_bytes: int) -> int:
        """Return the bytes to allocate from the device for a request that no free block serves."""
        return segment_bytes(size_bytes + BLOCK_BYTES - 1 & -BLOCK_BYTES)

    def use(self, name: Hashable, stream: str) -> None:
        """Record that another stream uses a live block, as `Tensor.record_stream` does."""
        block = self._live[name]
        if block is not None and block[2].stream != stream:
            self._uses.setdefault(name, {})[stream] = None

    def free(self, name: Hashable) -> None:
        """Free a live block: now, or when the streams that use it have reached this point.

        Raises:
            KeyError: there is no live block of that name.
        """
        block = self._live.pop(name)
        if block is None:
            return
        self.allocated_bytes -= block[1]
        if self._uses and name in self._uses:
            self._hold(name, block)
        else:
            self._give_back(block)

    def finish(self, stream: str) -> None:
        """Record that a stream has caught up with the host; blocks no longer wait for it.

        The blocks become free at the next request.
        """
        self._over += self._waiting.pop(stream, ())

    def empty_cache(self) -> None:
        """Wait for all streams, then return wholly free segments to the device.

        This is `release_cached_blocks`, which starts with `synchronize_and_free_events`.
        """
        self.synchronizations += 1
        for stream in list(self._waiting):
            self.finish(stream)
        self._give_back_what_is_over()
        for pool in chain(self._large.values(), self._small.values()):
            self._return_free(pool)

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return the streams the host has waited for to release memory since the last call.

        None means all streams: `release_block` calls `cudaFree`, which waits for the device.
        """
        return None

    def place_of(self, block: Block | Hashable) -> tuple[int, int]:
        """Return the address and the bytes of a live block, or of the block with this name."""
        found = block if isinstance(block, tuple) else self._live[block]
        assert found is not None
        return found[0], found[1]

    def free_places(self) -> frozenset[tuple[int, int]]:
        """Return the addresses and bytes of all free blocks."""
        return frozenset(self._size_at.items())

    def pieces(self) -> tuple[BlockPiece, ...]:
        """Return every block in order of address; together they are the reserved memory."""
        waiting = chain(self._over, *self._waiting.values())
        blocks: dict[int, BlockPiece] = {}
        for state, found in (
            (BlockState.LIVE, filter(None, self._live.values())),
            (BlockState.WAITING, chain.from_iterable(waiting)),
        ):
            for address, size, pool, _ in found:
                blocks[address] = BlockPiece(address, size, state, pool.stream)
        for pool in chain(self._small.values(), self._large.values()):
            for address, size in pool.blocks():
                blocks[address] = BlockPiece(address, size, BlockState.FREE, pool.stream)
        return tuple(blocks[address] for address in sorted(blocks))

    def figures(self) -> dict[str, int]:
        """Return statistics by their names in `torch.cuda.memory_stats`."""
        return self.journal.figures() | {
            "num_alloc_retries": self.retries,
            "num_ooms": self.ooms,
            "num_sync_all_streams": self.synchronizations,
            "num_device_alloc": self.device_allocations,
            "num_device_free": self.device_frees,
        }

    def _allocate_nothing(self, name: Hashable, size_bytes: int) -> bool:
        if name in self._live:
            raise AllocatorError(f"{name}: is live already")
        if size_bytes < 0:
            raise AllocatorError(f"{name}: {size_bytes} bytes must be at least 0")
        self._live[name] = None
        return True

    def _open(self, stream: str, *, small: bool) -> BlockPool:
        least = BLOCK_BYTES - 1 if small or self.expandable else SMALL_MAX_BYTES
        pool = BlockPool(stream, small=small, kept_bytes=least)
        (self._small if small else self._large)[stream] = pool
        return pool

    def _give_back(self, block: Block) -> None:
        """Free a block and merge it with free neighbors."""
        address, size, pool, requested = block
        joined, count = size, 1
        end = address + size
        following = self._size_at.pop(end, None)
        keys = pool.keys
        if following is not None:
            del keys[bisect_left(keys, following << ADDRESS_BITS | end)]
            end += following
            joined += following
            count -= 1
        before = self._start_of.pop(address, None)
        if before is not None:
            leading = address - before
            del keys[bisect_left(keys, leading << ADDRESS_BITS | before)]
            address = before
            joined += leading
            count -= 1
        self._size_at[address] = joined
        self._start_of[end] = address
        insort(keys, joined << ADDRESS_BITS | address)
        if self._collects and self._segments.get(address) == joined:
            self._free_since[address] = self._searches
        if self._changes is not None:
            if self._segments.get(address) == joined:
                self._changes.append((-size, -requested, size - joined, count - 1))
            else:
                self._changes.append((-size, -requested, size, count))

    def _hold(self, name: Hashable, block: Block) -> None:
        """Make a block wait for every stream that uses it: it is in the list of each."""
        if self._changes is not None:
            self.journal.held.append((len(self._changes), -block[1]))
        streams = self._uses.pop(name)
        waits = [block] * len(streams)
        for stream in streams:
            self._waiting.setdefault(stream, []).append(waits)

    def _give_back_what_is_over(self) -> None:
        for waits in self._over:
            block = waits.pop()
            if not waits:
                self._give_back(block)
                if self._changes is not None:
                    self.journal.held.append((len(self._changes), block[1]))
        self._over.clear()

    def _obtain(self, pool: BlockPool, wanted: int, place: int) -> int:
        """Return the place of the free block to use, growing from the device if needed; -1 if none.

        Follows `DeviceCachingAllocator::malloc`: `get_free_block`; else
        `garbage_collect_cached_blocks` and `alloc_block`; again after
        `release_available_cached_blocks`, and last after `release_cached_blocks`.
        """
        if not pool.small:
            self._searches += 1
        place = self._choose(pool, wanted, place)
        if place >= 0:
            return place
        if self._collects:
            self._collect_garbage()
        place = self._grow(pool, wanted)
        if place < 0 and self._return_unsplit(pool, wanted):
            place = self._grow(pool, wanted)
        if place < 0:
            self.empty_cache()
            self.retries += 1
            place = self._grow(pool, wanted)
        self.ooms += place < 0
        return place

    def _choose(self, pool: BlockPool, wanted: int, place: int) -> int:
        """Return the place of the cached block to use, from `place` on; -1 if there is none."""
        if place == len(pool.keys):
            return -1
        size, split_max = pool.keys[place] >> ADDRESS_BITS, self._split_max
        if wanted < split_max:
            return place if size < split_max else -1
        return place if size < wanted + self.settings.max_non_split_rounding_bytes else -1

    def _grow(self, pool: BlockPool, wanted: int) -> int:
        """Allocate a segment from the device; return its block's place, or -1 if out of memory."""
        size = segment_bytes(wanted)
        address = self._next_address
        if self.reserved_bytes + size > self.capacity_bytes or address + size > ADDRESS_MASK:
            return -1
        self._next_address += size + OWN_SEGMENT_ROUNDING_BYTES
        self._segments[address] = self._size_at[address] = size
        self._start_of[address + size] = address
        self._take(size, 1, small=pool.small)
        key = size << ADDRESS_BITS | address
        place = bisect_left(pool.keys, key)
        pool.keys.insert(place, key)
        return place

    def _take(self, size: int, count: int, *, small: bool) -> None:
        """Record bytes allocated from the device, or (negative) returned to it."""
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if size > 0:
            self.device_allocations += 1
        else:
            self.device_frees += 1
        if self._changes is not None:
            self.journal.segments.append((len(self._changes), size, count, small))

    def _return_unsplit(self, pool: BlockPool, wanted: int) -> bool:
        """Return unsplittable blocks to the device; return True if `wanted` bytes were released."""
        if self.settings.max_split_bytes is None:
            return False
        least = max(wanted, self._split_max)
        blocks = pool.blocks()
        fitting = [block for block in blocks if block[1] >= least]
        if fitting:
            self._return(pool, *fitting[0])
            return True
        returned = 0
        for address, size in reversed(blocks):
            if returned >= least or size < self._split_max:
                break
            self._return(pool, address, size)
            returned += size
        return returned >= least

    def _collect_garbage(self) -> None:
        """Free cached segments older than the average until memory is below the threshold."""
        allowed = int(self.settings.garbage_collection_threshold * self.capacity_bytes)
        excess = self.reserved_bytes - allowed
        if excess <= 0:
            return
        ages = {
            (address, size): (self._searches - self._free_since[address], pool)
            for pool in self._large.values()
            for address, size in pool.blocks()
            if self._segments.get(address) == size
        }
        while excess > 0 and ages:
            average = sum(age for age, _ in ages.values()) / len(ages)
            old = [block for block, (age, _) in ages.items() if age >= average]
            for block in old:
                _, pool = ages.pop(block)
                self._return(pool, *block)
                excess -= block[1]

    def _return_free(self, pool: BlockPool) -> None:
        """Return every wholly free segment of a pool to the device."""
        for address, size in pool.blocks():
            if self._segments.get(address) == size:
                self._return(pool, address, size)

    def _return(self, pool: BlockPool, address: int, size: int) -> None:
        pool.remove(address, size)
        del self._segments[address], self._size_at[address], self._start_of[address + size]
        self._take(-size, -1, small=pool.small)
