"""The memory of one rank while its host issues: ledger entries, and when the host must wait.

A request that no free block serves makes the host wait: for the uses of blocks with deferred frees,
and, if the allocator releases its cache, for the device. The allocator's state afterwards does not
depend on the duration of the wait. A request is therefore served at once, and the result
describes the wait that the host must do before it continues.

Follows `DeviceCachingAllocator::malloc` (c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13.0),
which starts with `process_events` and ends with `release_cached_blocks`. The time of CUDA driver
calls, other than the wait, is not modeled.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zsim.cluster.cluster import Cluster
from zsim.memory.caching import UNLIMITED
from zsim.memory.ledger import entry_of
from zsim.memory.peak import witness
from zsim.memory.reserved import allocator_of, capacity_bytes, needed_bytes
from zsim.memory.service import ExactMemory, Service
from zsim.schedule.operation import Allocate, Free, FreeMode
from zsim.schedule.schedule import Buffer, Discipline, Pool, Program, Schedule
from zsim.trace.trace import LedgerEntry, Reservation, Shortage

Pending = tuple[int, Free]
"""A deferred free whose memory has not returned, after the step in which it was issued."""


@dataclass(frozen=True, slots=True)
class MemoryWait:
    """The wait of a host inside a memory request.

    Attributes:
        uses: deferred frees whose uses the host waits for.
        streams: streams that it waits for as well; None means all streams.
    """

    uses: tuple[Pending, ...]
    streams: frozenset[str] | None


class RankMemory:
    """Memory of a rank that runs `program`, request by request, in its host's issue order."""

    def __init__(self, schedule: Schedule, program: Program, cluster: Cluster) -> None:
        self.pending: list[Pending] = []
        self._program = program
        self._entries: list[LedgerEntry] = []
        self._pools = {
            pool.name: _PoolMemory(pool, program, capacity_bytes(pool, schedule, program, cluster))
            for pool in schedule.pools
        }

    def allocate(
        self, step: int, allocate: Allocate, over: Callable[[Pending], bool]
    ) -> MemoryWait | None:
        """Serve a request; return the wait it causes, or None.

        `over` returns True if the uses of a deferred free have finished by now.
        """
        at = (step, allocate.id)
        buffer = self._program.by_name[allocate.buffer]
        pool = self._pools[buffer.pool]
        if self.pending:
            self._finish([each for each in self.pending if over(each)], at)
        wait: MemoryWait | None = None
        if pool.shortage is None and buffer.size_bytes:
            waits = pool.served.waits
            served = pool.served.take(buffer)
            if pool.served.waits > waits:
                found = self._waited_for(pool)
                self._finish(found, at)
                wait = MemoryWait(tuple(found), pool.served.synchronized_streams())
            if not served:
                asked = entry_of(allocate.id, step, buffer, buffer.size_bytes)
                pool.shortage = Shortage(
                    operation=allocate.id,
                    needed_bytes=pool.served.needed_bytes,
                    alive=witness([*self._entries, asked], pool.pool, UNLIMITED).alive,
                )
        self._enter(at, buffer, buffer.size_bytes, pool)
        return wait

    def free(self, step: int, free: Free) -> None:
        """Free a buffer; its uses have finished unless the free is deferred."""
        buffer = self._program.by_name[free.buffer]
        pool = self._pools[buffer.pool]
        deferred = free.mode is FreeMode.DEFERRED
        if pool.shortage is None and buffer.size_bytes:
            (pool.served.defer if deferred else pool.served.give)(buffer.name)
        if deferred:
            self.pending.append((step, free))
        else:
            self._enter((step, free.id), buffer, -buffer.size_bytes, pool)

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """Return the ledger so far."""
        return tuple(self._entries)

    def reservations(self) -> tuple[Reservation, ...]:
        """Return the reservations of each pool so far."""
        return tuple(pool.reservation() for pool in self._pools.values())

    def _finish(self, found: Sequence[Pending], at: tuple[int, str]) -> None:
        """Return the memory of deferred frees whose uses have finished, at an allocation."""
        gone = {id(each) for each in found}
        self.pending = [each for each in self.pending if id(each) not in gone]
        for each in found:
            pool = self._pool(each)
            buffer = self._program.by_name[each[1].buffer]
            if pool.shortage is None and buffer.size_bytes:
                pool.served.finish(buffer.name)
            self._enter(at, buffer, -buffer.size_bytes, pool)

    def _pool(self, pending: Pending) -> "_PoolMemory":
        return self._pools[self._program.by_name[pending[1].buffer].pool]

    def _waited_for(self, pool: "_PoolMemory") -> list[Pending]:
        """Return the deferred frees that a request to `pool` waits for, the oldest first."""
        waiting = [each for each in self.pending if self._pool(each) is pool]
        names = pool.served.waited_for
        if names is None:
            return waiting
        left = Counter(names)
        found: list[Pending] = []
        for each in waiting:
            if left[each[1].buffer]:
                left[each[1].buffer] -= 1
                found.append(each)
        return found

    def _enter(
        self, at: tuple[int, str], buffer: Buffer, change_bytes: int, pool: "_PoolMemory"
    ) -> None:
        step, operation = at
        self._entries.append(entry_of(operation, step, buffer, change_bytes))
        if pool.shortage is None:
            pool.course.append(pool.served.reserved_bytes)


class _PoolMemory:
    """One pool: its allocator, and its reserved bytes after each ledger entry until one failed."""

    def __init__(self, pool: Pool, program: Program, capacity: int | None) -> None:
        self.pool = pool.name
        self._pool, self._program = pool, program
        self.capacity_bytes = capacity
        self.course: list[int] = []
        self.shortage: Shortage | None = None
        self.served: Service | ExactMemory
        if pool.discipline is Discipline.EXACT:
            self.served = ExactMemory(capacity, program)
        else:
            self.served = Service(allocator_of(pool, capacity), program, pool.name)

    def reservation(self) -> Reservation:
        """Return the reservation so far."""
        return Reservation(
            pool=self.pool,
            capacity_bytes=self.capacity_bytes,
            course_bytes=tuple(self.course),
            shortage=self.shortage,
            waits=self.served.waits,
            needed_bytes=self._needed_bytes(),
        )

    def _needed_bytes(self) -> int:
        if self.shortage is None:
            return self.served.allocated_bytes
        return needed_bytes(self._program, self._pool)
