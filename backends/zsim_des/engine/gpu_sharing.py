"""Kernels that share a GPU with each other or with collectives, and slow down while they do.

A collective slows kernels down in two ways. Its own kernel occupies some multiprocessors from the
moment the rank reaches it (it waits there for its peers) until it ends; matrix products have that
many fewer. While its bytes move, they use bandwidth of the GPU's memory, and kernels that only move
memory get that much less.

A host that runs kernels itself has threads that carry the bytes. From the moment the rank reaches
the collective they work for as long as kernels were measured to lose, and share the cores evenly
with kernels. If no kernel runs, because the host waits for the collective, they slow down none;
work that they have left when the collective ends slows down the next kernel.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from zsim.cluster.cluster import Gpu
from zsim.network.volume import communications
from zsim.schedule.operation import AllToAll, Communication
from zsim.schedule.schedule import Program
from zsim_des.clock.ready_queue import Agenda

PARTS = 1000
"""Shares are counted in thousandths, so that work is a whole number."""

MOST = 900
"""Largest share of a GPU that collectives use, however many there are, in `PARTS`."""

EVEN = 840
"""Units of work per picosecond; divisible by 1 to 8, so up to eight kernels share evenly."""


@dataclass(slots=True)
class RunningKernel:
    """A running kernel: its remaining work, and the function to call at its end.

    `memory` is the share of its unshared time, in `PARTS`, in which it only moves memory.
    """

    left: int
    memory: int
    ended: Callable[[int], None]


@lru_cache(maxsize=4096)
def _parts_of(bytes_per_s: Fraction, memory_bytes_per_s: int) -> int:
    """Return `bytes_per_s` as a share of the GPU's memory bandwidth, in `PARTS`."""
    return round(bytes_per_s * PARTS / memory_bytes_per_s)


def takes_from_kernels(gpu: Gpu) -> bool:
    """Return True if a collective slows down kernels that run at the same time."""
    measured = gpu.measured
    return bool(gpu.collective_share) or (measured is not None and measured.takes_from_host)


def library_sms(members: Iterable[Communication]) -> int:
    """Return the multiprocessors of the largest library kernel of `members`; 0 if there is none."""
    transports = (each.by for each in members if isinstance(each, AllToAll))
    return max((each.num_sms for each in transports if each is not None), default=0)


def uses_libraries(program: Program) -> bool:
    """Return True if a library executes an exchange of `program`."""
    return any(library_sms(communications(each)) for each in program.step_patterns)


class GpuSharing:
    """The kernels and collectives of one rank that run at the same time.

    Kernels on several streams get equal shares. Each would fill the GPU alone, so running them
    together takes as long as running them in sequence.
    """

    def __init__(self, agenda: Agenda, gpu: Gpu) -> None:
        self._agenda = agenda
        measured = gpu.measured
        self.has_threads = measured is not None and measured.takes_from_host
        self._share = 0 if self.has_threads else round(gpu.collective_share * PARTS)
        self._memory_bytes_per_s = gpu.memory_bytes_per_s
        self._collectives = 0
        self._taken = 0
        self._traffic = 0
        self._kernels: list[RunningKernel] = []
        self._changed_ps = 0
        self._version = 0

    @property
    def is_free(self) -> bool:
        """Return True if no kernel and no collective is running."""
        return not (self._kernels or self._collectives or self._traffic)

    def now_ps(self) -> int:
        """Return the current time in picoseconds."""
        return self._agenda.env.now

    def come(self, *, share: int | None = None) -> None:
        """Let a collective occupy its multiprocessors from now on.

        `share` is in `PARTS`; None is that of NCCL's collectives.
        """
        self._collectives += share != 0
        self._change(self._share if share is None else share, 0)

    def carry(self, time_ps: int) -> None:
        """Let host threads that carry bytes work for `time_ps` from now on."""
        if time_ps:
            self.kernel(time_ps, 0, _nothing)

    def move(self, bytes_per_s: Fraction, before: int) -> int:
        """Let a collective that has arrived use `bytes_per_s` of memory bandwidth from now on.

        `before` is the share that it used until now, in `PARTS`. Return its new share; the caller
        passes it to `leave` at the end.
        """
        parts = _parts_of(bytes_per_s, self._memory_bytes_per_s)
        if parts != before:
            self._change(0, parts - before)
        return parts

    def leave(self, at_ps: int, parts: int, *, share: int | None = None) -> None:
        """Let a collective leave at `at_ps`, now or later, and release `parts` of the bandwidth."""
        taken = self._share if share is None else share

        def gone() -> None:
            self._collectives -= share != 0
            self._change(-taken, -parts)

        self._agenda.at(at_ps, gone)

    def _change(self, taken: int, traffic: int) -> None:
        if not self._kernels:  # no kernel runs that this could slow down
            self._taken += taken
            self._traffic += traffic
            return
        self._advance()
        self._taken += taken
        self._traffic += traffic
        self._arm()

    def kernel(self, time_ps: int, memory_ps: int, ended: Callable[[int], None]) -> None:
        """Start work that takes `time_ps` with the GPU to itself; call `ended` when it ends.

        In `memory_ps` of that time its kernels only move memory.
        """
        self._advance()
        memory = memory_ps * PARTS // time_ps
        self._kernels.append(RunningKernel(time_ps * PARTS * EVEN, memory, ended))
        self._arm()

    def _speed(self, kernel: RunningKernel) -> int:
        """Return the units of work that `kernel` does in a picosecond."""
        busy = PARTS - min(MOST, self._taken)
        free = PARTS - min(MOST, self._traffic)
        taken = (PARTS - kernel.memory) * free + kernel.memory * busy
        return EVEN * PARTS * busy * free // (taken * len(self._kernels))

    def _advance(self) -> None:
        now = self.now_ps()
        passed_ps, self._changed_ps = now - self._changed_ps, now
        if passed_ps:
            for kernel in self._kernels:
                kernel.left -= passed_ps * self._speed(kernel)

    def _arm(self) -> None:
        """Set an alarm for the next kernel to end; it replaces earlier alarms."""
        self._version = version = self._version + 1
        if not self._kernels:
            return
        wait_ps = min([-(-kernel.left // self._speed(kernel)) for kernel in self._kernels])
        self._agenda.at(self.now_ps() + max(0, wait_ps), lambda: self._alarm(version))

    def _alarm(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [kernel for kernel in self._kernels if kernel.left <= 0]
        self._kernels = [kernel for kernel in self._kernels if kernel.left > 0]
        self._arm()
        for kernel in ended:
            kernel.ended(self.now_ps())


def _nothing(_: int) -> None:
    """Do nothing: no stream waits for threads that carry bytes."""
