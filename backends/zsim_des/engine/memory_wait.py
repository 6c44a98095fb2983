"""Memory of a simulated rank that may run out, so that allocations of its host wait for frees.

A host requests memory only if memory may run out; otherwise no time depends on memory.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from zsim.memory import MemoryWait, Pending, RankMemory
from zsim.schedule.operation import Allocate, Free, FreeMode
from zsim_des.engine.stream import UNKNOWN, ProgramRun

Awaited = tuple[ProgramRun, int]
"""A slot in one run of a part."""


class AllocationService:
    """Serves the allocations of one rank's host. `slots` maps operation ids of its program."""

    def __init__(self, memory: RankMemory, slots: Mapping[str, int]) -> None:
        self._memory = memory
        self._slots = slots
        self._instances: dict[int, ProgramRun] = {}
        self._tails: dict[str, Awaited] = {}
        self._left: dict[tuple[int, str], list[Awaited]] = {}
        self.ledger = memory.ledger
        self.reservations = memory.reservations

    def issue(self, instance: ProgramRun, frees: Sequence[Free], tails: Mapping[str, int]) -> None:
        """Record a stretch that the host has issued: its frees, and the last entry per stream."""
        self._instances[instance.step] = instance
        for free in frees:
            self._memory.free(instance.step, free)
            if free.mode is FreeMode.DEFERRED:
                pending = (instance.step, free)
                self._left[instance.step, free.id] = self._uses(pending)
        self._tails |= {stream: (instance, slot) for stream, slot in tails.items()}

    @property
    def depends_on_time(self) -> bool:
        """Return True if the end of some use of a pending deferred free is not known yet."""
        return any(
            where.ends[slot] == UNKNOWN
            for step, free in self._memory.pending
            for where, slot in self._left[step, free.id]
        )

    def allocate(self, instance: ProgramRun, allocate: Allocate, now_ps: int) -> list[Awaited]:
        """Serve a request at `now_ps`; return the slots that the host has to wait for."""
        over = partial(self._is_over, now_ps)
        wait = self._memory.allocate(instance.step, allocate, over)
        return [] if wait is None else self._awaited(wait)

    def _is_over(self, now_ps: int, pending: Pending) -> bool:
        """Return True if all uses have ended at `now_ps`; remove ended uses from the list."""
        step, free = pending
        left = self._left[step, free.id]
        while left:
            where, slot = left[-1]
            if not UNKNOWN < where.ends[slot] <= now_ps:
                return False
            left.pop()
        return True

    def _uses(self, pending: Pending) -> list[Awaited]:
        step, free = pending
        instance = self._instances[step]
        return [(instance, self._slots[use]) for use in free.uses]

    def _awaited(self, wait: MemoryWait) -> list[Awaited]:
        found = [use for pending in wait.uses for use in self._uses(pending)]
        streams = self._tails if wait.streams is None else wait.streams
        return found + [self._tails[stream] for stream in streams if stream in self._tails]
