"""A book passed on to an allocator, tensor by tensor where a course says which there are.

A buffer is one request, served where the book has it. One with a course is allocated when a
segment runs, whose tensors come and go as they do there, and those of the other buffers of the
course with them, instead of where the book has these.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from zsim.memory.caching import UNLIMITED, CachingAllocator
from zsim.memory.named_blocks import NamedBlocks
from zsim.memory.pinned import PinnedAllocator
from zsim.memory.quick_caching import QuickAllocator, Turn, turn
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.schedule import Buffer, Program
from zsim.trace.trace import BookEntry

Deferred = tuple[tuple[int, str], ...]
"""Frees that are deferred: how many lines the book had when the host issued it, and the buffer."""

_Key = tuple[int, int]
"""A tensor in a course: the number of its buffer, and its own."""

VOID, GONE, ALIVE = range(3)
"""States of a buffer whose tensors take turns: there is none, it is not alive, it is."""


class Service:
    """Serves the book of a rank that runs `program`, of one pool.

    Attributes:
        refused_bytes: what the allocator could not serve; 0 if it served all.
        waits: requests that were served after the host had waited for memory to come back.
        waited_for: buffers whose deferred frees the latest such wait was for; None is all.
    """

    def __init__(
        self, allocator: CachingAllocator | PinnedAllocator, program: Program, pool: str
    ) -> None:
        self.refused_bytes = self.waits = 0
        self.waited_for: list[str] | None = None
        self._allocator = allocator
        self._blocks = (
            allocator if isinstance(allocator, QuickAllocator) else NamedBlocks(allocator)
        )
        self._buffers = program.by_name
        self._pool = pool
        self._rest = _beside_courses(program)
        self._count = 0
        self._alive: dict[str, deque[Any]] = {}
        self._waiting: dict[str, deque[str]] = {}
        self._tensors: dict[str, dict[int, Any]] = {}
        self._keys: dict[_Key, int] = {}
        self._turns: dict[tuple[int, tuple[int, ...]], list[Turn]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Return what the allocator has taken from its device."""
        return self._allocator.reserved_bytes

    @property
    def needed_bytes(self) -> int:
        """Return what the device would have to have for the request that could not be served."""
        return self.reserved_bytes + self._allocator.growth_bytes(self.refused_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Return the most that was allocated, without what waits for the uses of its free."""
        return self._allocator.peak_allocated_bytes

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return the streams that the host has waited for since asked last; None is all of them."""
        return self._allocator.synchronized_streams()

    def course(self, entries: Sequence[BookEntry], deferred: Deferred = ()) -> list[int]:
        """Serve a book; what is reserved after each line of the pool, up to one that fails."""
        pool, buffers, allocator, waiting = (
            self._pool,
            self._buffers,
            self._allocator,
            self._waiting,
        )
        frees = deque(
            (line, name)
            for line, name in deferred
            if buffers[name].pool == pool and buffers[name].size_bytes
        )
        found: list[int] = []
        for number, entry in enumerate(entries):
            while frees and frees[0][0] <= number:
                self.defer(frees.popleft()[1])
            if entry.pool != pool:
                continue
            name, size = entry.buffer, entry.change_bytes
            if size > 0:
                if not self.take(buffers[name]):
                    break
            elif size < 0 and waiting.get(name):
                self.finish(name)
            elif size < 0:
                self.give(name)
            found.append(allocator.reserved_bytes)
        return found

    def take(self, buffer: Buffer) -> bool:
        """Allocate a buffer, or run its course; return whether there was memory."""
        name, course, allocator = buffer.name, buffer.course, self._allocator
        block: Any = None
        size = self._rest.get(name, 0 if course is not None else buffer.size_bytes)
        before = allocator.device_frees + allocator.synchronizations
        if size:
            block = self._blocks.take(size, buffer.home)
            if block is None:
                self.refused_bytes = size
        alive = self._alive.get(name)
        if alive is None:
            alive = self._alive[name] = deque()
        alive.append(block)
        if self.refused_bytes or not (course is None or self._run(name, course, buffer.home)):
            return False
        # Memory went back to the device, or the host waited for streams so that it might.
        self.waits += allocator.device_frees + allocator.synchronizations > before
        return True

    def _run(self, own: str, course: AllocationTrace, stream: str) -> bool:
        """Serve the turns of a segment; whether there was memory."""
        names = (own, *course.buffers)
        tables = [self._tensors.setdefault(name, {}) for name in names]
        alive = self._alive
        states = tuple([(ALIVE if alive.get(name) else GONE) if name else VOID for name in names])
        turns = self._turns_of(course, states)
        self.refused_bytes = self._blocks.serve(turns, tables, stream)
        return not self.refused_bytes

    def _turns_of(self, course: AllocationTrace, states: tuple[int, ...]) -> list[Turn]:
        """Return the turns that are not void, once for all courses and buffers that are alike."""
        key = (id(course.turns), states)
        found = self._turns.get(key)
        if found is None:
            number_of, keys = self._keys.setdefault, self._keys
            found = self._turns[key] = [
                turn(number, number_of((number, tensor), len(keys)), size)
                for number, tensor, size in course.turns
                if states[number] != VOID and (size or states[number] == GONE)
            ]
        return found

    def _end(self, name: str) -> list[Any]:
        """Blocks of a buffer that goes: it is no longer alive."""
        alive = self._alive.get(name)
        block = alive.popleft() if alive else None  # schedules that nobody proved may free twice
        blocks = [] if block is None else [block]
        if name in self._tensors:
            blocks += self._tensors.pop(name).values()
        return blocks

    def give(self, name: str) -> None:
        """Free a buffer."""
        for block in self._end(name):
            self._blocks.give(block)

    def finish(self, name: str) -> None:
        """Return the memory of the buffer's earliest deferred free: its uses have ended."""
        self._allocator.finish(self._waiting[name].popleft())

    def defer(self, name: str) -> None:
        """Free a buffer when its uses on other streams end, which `finish` says."""
        self._count += 1
        stream = f"{name}@{self._count}"  # a stream of its own
        for block in self._end(name):
            self._blocks.hold(block, stream)
        self._waiting.setdefault(name, deque()).append(stream)


class ExactMemory:
    """Serves a pool that reserves what is booked; the same methods as `Service`."""

    def __init__(self, capacity_bytes: int | None, program: Program) -> None:
        self.reserved_bytes = self.needed_bytes = self.allocated_bytes = self.waits = 0
        self.waited_for: list[str] | None = None
        self._capacity_bytes = UNLIMITED if capacity_bytes is None else capacity_bytes
        self._sizes = {buffer.name: buffer.size_bytes for buffer in program.buffers}
        self._deferred: deque[str] = deque()
        self._returned = 0

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return none: there is no cache to give back."""
        return frozenset()

    def take(self, buffer: Buffer) -> bool:
        """Allocate a buffer, after a wait for the oldest deferred frees that make room for it.

        A wait for more of them might end later in less memory. False: there is too little.
        """
        short = self.reserved_bytes + buffer.size_bytes - self._capacity_bytes
        waited_for = self.waited_for = list[str]()
        while short > 0 and self._deferred:
            waited_for.append(name := self._deferred.popleft())
            self.reserved_bytes -= self._sizes[name]
            short -= self._sizes[name]
        self._returned += len(waited_for)
        self.waits += bool(waited_for)
        self.needed_bytes = self.reserved_bytes + buffer.size_bytes
        if short > 0:
            return False
        self.reserved_bytes = self.needed_bytes
        pending = sum(self._sizes[name] for name in self._deferred)
        self.allocated_bytes = max(self.allocated_bytes, self.reserved_bytes - pending)
        return True

    def give(self, name: str) -> None:
        """Free a buffer."""
        self.reserved_bytes -= self._sizes[name]

    def defer(self, name: str) -> None:
        """Free a buffer when its uses on other streams have ended, which `finish` says."""
        self._deferred.append(name)

    def finish(self, name: str) -> None:
        """Return the memory of the buffer's earliest deferred free, if a wait has not done so."""
        if self._returned:
            self._returned -= 1
        else:
            self._deferred.remove(name)
            self.reserved_bytes -= self._sizes[name]


def _beside_courses(program: Program) -> dict[str, int]:
    """Of buffers that take turns in courses, what is beside their tensors there."""
    tensors: dict[str, dict[_Key, int]] = {}
    for buffer in program.buffers:
        if buffer.course is not None:
            for number, tensor, size in buffer.course.turns:
                if size > 0 and number:
                    name = buffer.course.name(number, buffer.name)
                    tensors.setdefault(name, {})[number, tensor] = size
    by_name = program.by_name
    return {
        name: max(0, by_name[name].size_bytes - sum(sizes.values()))
        for name, sizes in tensors.items()
        if name
    }
