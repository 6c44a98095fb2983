"""The memory of one rank: blocks that buffers take and give back, as a caching allocator's do."""

from dataclasses import dataclass
from typing import Generic

from zsim.backend.values import A, Values
from zsim.dtype import DType
from zsim.schedule.schedule import Buffer


@dataclass(slots=True, eq=False)
class MemoryBlock(Generic[A]):
    """Memory of `elements`; one buffer after the other lies in it."""

    elements: int
    memory: A


class BlockMemory(Generic[A]):
    """Buffers of one rank by name, each in a block.

    A freed block goes to the next buffer of its pool, home stream and format that fits: the
    smallest that does, and of those the one freed last. That is as soon as reuse is allowed, so a
    free that comes too early is met.
    """

    def __init__(self, values: Values[A]) -> None:
        self._values = values
        self.blocks: dict[str, MemoryBlock[A]] = {}
        self._free: dict[tuple[str, str, DType], list[MemoryBlock[A]]] = {}

    def allocate(self, buffer: Buffer) -> bool:
        """`buffer` has a block; False if it had one already, which is lost."""
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
        """`block`, in which `buffer` was, can be taken again."""
        self._free.setdefault((buffer.pool, buffer.home, buffer.dtype), []).append(block)

    def block(self, buffer: Buffer) -> MemoryBlock[A] | None:
        """Return the block that `buffer` has now."""
        return self.blocks.get(buffer.name)
