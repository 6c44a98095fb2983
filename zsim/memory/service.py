"""Serves the ledger of a rank from an allocator, tensor by tensor if a buffer has a trace.

A buffer without a trace is one request, served at its ledger entry. A buffer with a trace
(`course`) is allocated when its segment runs: the tensors in the trace are then allocated and freed
in its order, instead of at the ledger entries of their buffers.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from zsim.memory.caching import UNLIMITED, CachingAllocator
from zsim.memory.named_blocks import NamedBlocks
from zsim.memory.pinned import PinnedAllocator
from zsim.memory.quick_caching import QuickAllocator, Turn, turn
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.schedule import Buffer, Program
from zsim.trace.trace import LedgerEntry

Deferred = tuple[tuple[int, str], ...]
"""Deferred frees: the number of ledger entries when the host issued each, and its buffer."""

_Key = tuple[int, int]
"""A tensor in a trace: the number of its buffer, and of the tensor."""

VOID, GONE, ALIVE = range(3)
"""States of a buffer in a trace: no such buffer, not alive, alive."""


class Service:
    """Serves the ledger entries of one pool, for a rank that runs `program`.

    Attributes:
        refused_bytes: bytes of the request that failed; 0 if none did.
        waits: requests that were served after the host had waited for memory to return.
        waited_for: buffers whose deferred frees the latest wait was for; None means all.
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
        self._rest = _bytes_outside_traces(program)
        self._count = 0
        self._alive: dict[str, deque[Any]] = {}
        self._waiting: dict[str, deque[str]] = {}
        self._tensors: dict[str, dict[int, Any]] = {}
        self._keys: dict[_Key, int] = {}
        self._turns: dict[tuple[int, tuple[int, ...]], list[Turn]] = {}

    @property
    def reserved_bytes(self) -> int:
        """Return the bytes that the allocator has reserved from its device."""
        return self._allocator.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the peak of reserved bytes."""
        allocator = self._allocator
        assert isinstance(allocator, CachingAllocator)
        return allocator.peak_reserved_bytes

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that the device would need for the failed request."""
        return self.reserved_bytes + self._allocator.growth_bytes(self.refused_bytes)

    @property
    def allocated_bytes(self) -> int:
        """Return the peak of allocated bytes, without blocks that wait for uses after the free."""
        return self._allocator.peak_allocated_bytes

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return the streams that the host has waited for since the last call; None means all."""
        return self._allocator.synchronized_streams()

    def course(self, entries: Sequence[LedgerEntry], deferred: Deferred = ()) -> list[int]:
        """Serve a ledger; return the reserved bytes after each entry of the pool.

        The list ends before the first entry that fails.
        """
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
        """Allocate a buffer, or serve its trace; return True unless out of memory."""
        name, course, allocator = buffer.name, buffer.course, self._allocator
        block: Any = None
        size = self._rest.get(name, 0 if course is not None else buffer.size_bytes)
        before = allocator.device_frees + allocator.synchronizations
        if size:
            block = self._blocks.take(size, home_of(buffer))
            if block is None:
                self.refused_bytes = size
        alive = self._alive.get(name)
        if alive is None:
            alive = self._alive[name] = deque()
        alive.append(block)
        if self.refused_bytes or not (course is None or self._run(name, course, home_of(buffer))):
            return False
        # Memory returned to the device, or the host waited for streams so that it might.
        self.waits += allocator.device_frees + allocator.synchronizations > before
        return True

    def _run(self, own: str, course: AllocationTrace, stream: str) -> bool:
        """Serve the turns of a segment; return True unless out of memory."""
        names = (own, *course.buffers)
        tables = [self._tensors.setdefault(name, {}) for name in names]
        alive = self._alive
        states = tuple([(ALIVE if alive.get(name) else GONE) if name else VOID for name in names])
        turns = self._turns_of(course, states)
        self.refused_bytes = self._blocks.serve(turns, tables, stream)
        return not self.refused_bytes

    def _turns_of(self, course: AllocationTrace, states: tuple[int, ...]) -> list[Turn]:
        """Return the turns that take effect, cached by the trace's turns and buffer states."""
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
        """Remove a buffer and return its blocks."""
        alive = self._alive.get(name)
        block = alive.popleft() if alive else None  # schedules that are not proved may free twice
        blocks = [] if block is None else [block]
        if name in self._tensors:
            blocks += self._tensors.pop(name).values()
        return blocks

    def give(self, name: str) -> None:
        """Free a buffer."""
        for block in self._end(name):
            self._blocks.give(block)

    def layout(self, label: Callable[[str], Hashable]) -> Hashable:
        """Return the places of all blocks: free ones, and live ones by the label of a buffer.

        Equal layouts serve all later requests in the same places.
        """
        allocator = self._allocator
        assert isinstance(allocator, CachingAllocator)
        live = [
            (label(name), -1 - number, *allocator.place_of(block))
            for name, blocks in self._alive.items()
            for number, block in enumerate(blocks)
            if block is not None
        ]
        live += [
            (label(name), key, *allocator.place_of(block))
            for name, table in self._tensors.items()
            for key, block in table.items()
        ]
        return allocator.free_places(), frozenset(live)

    def finish(self, name: str) -> None:
        """Return the memory of the buffer's earliest deferred free: its uses have finished."""
        self._allocator.finish(self._waiting[name].popleft())

    def defer(self, name: str) -> None:
        """Free a buffer once its uses on other streams finish, at the call of `finish`."""
        self._count += 1
        stream = f"{name}@{self._count}"  # a separate stream
        for block in self._end(name):
            self._blocks.hold(block, stream)
        self._waiting.setdefault(name, deque()).append(stream)


def home_of(buffer: Buffer) -> str:
    """Return the name of the stream, or graph on it, whose memory serves a buffer."""
    return f"{buffer.home} in a graph" if buffer.captured else buffer.home


class ExactMemory:
    """Serves a pool that reserves exactly its buffers' bytes, with the methods of `Service`."""

    def __init__(self, capacity_bytes: int | None, program: Program) -> None:
        self.reserved_bytes = self.needed_bytes = self.allocated_bytes = self.waits = 0
        self.waited_for: list[str] | None = None
        self._capacity_bytes = UNLIMITED if capacity_bytes is None else capacity_bytes
        self._sizes = {buffer.name: buffer.size_bytes for buffer in program.buffers}
        self._deferred: deque[str] = deque()
        self._returned = 0

    def synchronized_streams(self) -> frozenset[str] | None:
        """Return an empty set: there is no cache to release."""
        return frozenset()

    def take(self, buffer: Buffer) -> bool:
        """Allocate a buffer, after a wait for the oldest deferred frees that make room for it.

        Waiting for more frees than needed could leave less memory later. Return False if out of
        memory.
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
        """Free a buffer once its uses on other streams finish, at the call of `finish`."""
        self._deferred.append(name)

    def finish(self, name: str) -> None:
        """Return the memory of the buffer's earliest deferred free, unless a wait has done so."""
        if self._returned:
            self._returned -= 1
        else:
            self._deferred.remove(name)
            self.reserved_bytes -= self._sizes[name]


def _bytes_outside_traces(program: Program) -> dict[str, int]:
    """Return the bytes of each buffer that are not covered by its tensors in traces."""
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
