"""Blocks of an allocator: address ranges, and a stream's free blocks in order of size."""

from bisect import bisect_left, insort
from enum import StrEnum
from typing import NamedTuple

ADDRESS_BITS = 56
"""A free block is one number, its size above its address: numbers sort by size, then address."""
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1

Block = tuple[int, int, "BlockPool", int]
"""A block that is not free: address, bytes, pool, and the requested bytes."""


class BlockState(StrEnum):
    """The state of a block: in use, freed but waiting for streams, or free."""

    LIVE = "live"
    WAITING = "waiting"
    FREE = "free"


class BlockPiece(NamedTuple):
    """A block as reported by `CachingAllocator.pieces`."""

    address: int
    size_bytes: int
    state: BlockState
    stream: str


class BlockPool:
    """The small or the large free blocks of one stream.

    Attributes:
        keys: size and address of each block as one number, sorted.
        kept_bytes: the remainder of a block is split off if it is larger than this.
    """

    __slots__ = ("kept_bytes", "keys", "small", "stream")

    def __init__(self, stream: str, *, small: bool, kept_bytes: int) -> None:
        self.stream = stream
        self.small = small
        self.kept_bytes = kept_bytes
        self.keys: list[int] = []

    def add(self, address: int, size_bytes: int) -> None:
        """Add a free block."""
        insort(self.keys, size_bytes << ADDRESS_BITS | address)

    def remove(self, address: int, size_bytes: int) -> None:
        """Remove a block that is no longer free."""
        del self.keys[bisect_left(self.keys, size_bytes << ADDRESS_BITS | address)]

    def blocks(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of each free block, the smallest first."""
        return [(key & ADDRESS_MASK, key >> ADDRESS_BITS) for key in self.keys]
