"""Kernels that share a GPU, with each other or with collectives: they take longer meanwhile.

A collective takes two things from kernels. Its own kernel occupies some multiprocessors from when
the rank reaches it, for it waits there for its peers, until it ends; products of matrices have that
many fewer. And while its bytes move they pass the memory of the GPU; kernels that only move memory
have so much less of its bandwidth.

A host that runs kernels itself has threads that carry the bytes. They work for as long as was
measured that kernels lose to them, from when the rank has reached the collective, and share its
cores with kernels evenly. Where none runs, as the host waits for the collective, they take nothing
from any; what they have left to do when it has ended they take from the next one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from zsim.cluster.cluster import Gpu
from zsim_des.ready_queue import Agenda

PARTS = 1000
"""Shares are whole numbers of so many parts of one, so that work is counted in whole numbers."""

MOST = 900
"""Parts of a GPU that collectives take at most, however many there are."""

EVEN = 840
"""Parts of a picosecond in which work is counted: up to eight kernels share one evenly."""


@dataclass(slots=True)
class RunningKernel:
    """A kernel under way, with the parts of its work that are left and what to do at its end.

    Of its time with the GPU to itself `memory` parts are spent in kernels that only move memory.
    """

    left: int
    memory: int
    ended: Callable[[int], None]


@lru_cache(maxsize=4096)
def _parts_of(bytes_per_s: Fraction, memory_bytes_per_s: int) -> int:
    """Return the parts of the bandwidth of a GPU's memory that `bytes_per_s` are."""
    return round(bytes_per_s * PARTS / memory_bytes_per_s)


def takes_from_kernels(gpu: Gpu) -> bool:
    """Return whether a collective takes anything from kernels beside it."""
    measured = gpu.measured
    return bool(gpu.collective_share) or (measured is not None and measured.takes_from_host)


class Beside:
    """The kernels and collectives of one rank, from change to change.

    Kernels of several streams get equal parts: each would fill the GPU alone, so both take as long
    together as one after the other.
    """

    def __init__(self, agenda: Agenda, gpu: Gpu) -> None:
        self._agenda = agenda
        measured = gpu.measured
        self.has_threads = measured is not None and measured.takes_from_host
        self._share = 0 if self.has_threads else round(gpu.collective_share * PARTS)
        self._memory_bytes_per_s = gpu.memory_bytes_per_s
        self._collectives = 0
        self._traffic = 0
        self._kernels: list[RunningKernel] = []
        self._changed_ps = 0
        self._version = 0

    @property
    def is_free(self) -> bool:
        """Return whether no kernel and no collective is under way."""
        return not (self._kernels or self._collectives or self._traffic)

    def now_ps(self) -> int:
        """Return the time that it is."""
        return int(self._agenda.env.now)

    def come(self, *, takes: bool = True) -> None:
        """Let a collective occupy its multiprocessors from now on, if it `takes` any."""
        self._change(int(takes), 0)

    def carry(self, time_ps: int) -> None:
        """Let threads of the host that carry bytes work for `time_ps` from now on."""
        if time_ps:
            self.kernel(time_ps, 0, _nothing)

    def move(self, bytes_per_s: Fraction, before: int) -> int:
        """Let a collective that has come take `bytes_per_s` of the memory's bandwidth from now on.

        It took `before` parts of it. Return the parts that this is, to be given back when it
        leaves.
        """
        parts = _parts_of(bytes_per_s, self._memory_bytes_per_s)
        if parts != before:
            self._change(0, parts - before)
        return parts

    def leave(self, at_ps: int, parts: int, *, takes: bool = True) -> None:
        """Let a collective go at `at_ps`, now or later, which takes `parts` of the bandwidth."""
        self._agenda.at(at_ps, lambda: self._change(-int(takes), -parts))

    def _change(self, collectives: int, traffic: int) -> None:
        if not self._kernels:  # nothing runs that this could slow down
            self._collectives += collectives
            self._traffic += traffic
            return
        self._advance()
        self._collectives += collectives
        self._traffic += traffic
        self._arm()

    def kernel(self, time_ps: int, memory_ps: int, ended: Callable[[int], None]) -> None:
        """Begin work that takes `time_ps` with the GPU to itself; `ended` is told when it ends.

        In `memory_ps` of that time kernels run that only move memory.
        """
        self._advance()
        memory = memory_ps * PARTS // time_ps
        self._kernels.append(RunningKernel(time_ps * PARTS * EVEN, memory, ended))
        self._arm()

    def _speed(self, kernel: RunningKernel) -> int:
        """Return the parts of work that `kernel` does in a picosecond."""
        busy = PARTS - min(MOST, self._collectives * self._share)
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
        """Wake up when the next kernel ends; an earlier alarm no longer counts."""
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
    """Nobody waits for threads that carry bytes."""
