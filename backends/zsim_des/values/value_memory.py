"""The memory of one rank: blocks that are reused between buffers, as in a caching allocator."""

from dataclasses import dataclass
from typing import Generic

from zsim.backend.values import A, Values
from zsim.dtype import DType
from zsim.schedule.schedule import Buffer


@dataclass(slots=True, eq=False)
class MemoryBlock(Generic[A]):
    """Memory of `elements`, used by one buffer at a time."""

    elements: int
    memory: A


class BlockMemory(Generic[A]):
    """Buffers of one rank by name, each in a block.

    A freed block goes to the next buffer of the same pool, home stream and format that fits. The
    smallest such block is used, and among equal ones the one freed last. This is the earliest
    possible reuse, so a free that comes too early corrupts values.
    """

    def __init__(self, values: Values[A]) -> None:
        self._values = values
        self.blocks: dict[str, MemoryBlock[A]] = {}
        self._free: dict[tuple[str, str, DType], list[MemoryBlock[A]]] = {}

    def allocate(self, buffer: Buffer) -> bool:
        """Assign `buffer` a block; return False if it had one already, which is then lost."""
        free = self._free.setdefault((buffer.pool, buffer.home, buffer.dtype), [])
        fits = [block for block in free if block.elements >= buffer.elements]
        if fits:
            block = min(reversed(fits), key=lambda each: each.elements)
            free.remove(block)
        else:
            block = MemoryBlock(buffer.elements, self._values.memory(buffer.elements, buffer.dtype))
        was_free = buffer.name not in self.blocks
        self.blocks[buffer.name] = block
        return was_free

    def give_back(self, buffer: Buffer, block: MemoryBlock[A]) -> None:
        """Make `block`, which held `buffer`, available for reuse."""
        self._free.setdefault((buffer.pool, buffer.home, buffer.dtype), []).append(block)

    def block(self, buffer: Buffer) -> MemoryBlock[A] | None:
        """Return the current block of `buffer`, or None."""
        return self.blocks.get(buffer.name)
