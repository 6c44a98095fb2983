"""Kernels that share a GPU, with each other or with a collective: they take longer meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from zsim_des.ready_queue import Agenda


@dataclass(slots=True)
class RunningKernel:
    """One under way: picoseconds of work left since the last change, and what to do at its end."""

    left: Fraction
    ended: Callable[[int], None]


class Beside:
    """The kernels and collectives of one rank, from change to change.

    A collective is there from when the rank reached it, for it waits for its peers on the GPU.
    Kernels of several streams get equal parts: each would fill the GPU alone, so both take as long
    together as one after the other.
    """

    def __init__(self, agenda: Agenda, slowdown: Fraction) -> None:
        self._agenda = agenda
        self._slowdown = slowdown
        self._collectives = 0
        self._kernels: list[RunningKernel] = []
        self._changed_ps = 0
        self._version = 0

    def now_ps(self) -> int:
        """Return the time."""
        return int(self._agenda.env.now)

    def come(self) -> None:
        """Note that a collective has come."""
        self._change(1)

    def leave(self, at_ps: int) -> None:
        """Note that a collective goes at `at_ps`, now or later."""
        self._agenda.at(at_ps, lambda: self._change(-1))

    def _change(self, count: int) -> None:
        self._advance()
        self._collectives += count
        self._arm()

    def kernel(self, time_ps: int, ended: Callable[[int], None]) -> None:
        """Work that takes `time_ps` with the GPU to itself, from now on; told when it has ended."""
        self._advance()
        self._kernels.append(RunningKernel(Fraction(time_ps), ended))
        self._arm()

    def _factor(self) -> Fraction:
        sharing = max(1, len(self._kernels))
        return sharing * (self._slowdown if self._collectives else Fraction(1))

    def _advance(self) -> None:
        now = self.now_ps()
        done = (now - self._changed_ps) / self._factor()
        self._changed_ps = now
        for kernel in self._kernels:
            kernel.left -= done

    def _arm(self) -> None:
        """Wake up when the next kernel ends; an earlier alarm no longer counts."""
        self._version = version = self._version + 1
        if not self._kernels:
            return
        wait = min(kernel.left for kernel in self._kernels) * self._factor()
        wait_ps = max(0, -(-wait.numerator // wait.denominator))
        self._agenda.at(self.now_ps() + wait_ps, lambda: self._alarm(version))

    def _alarm(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [kernel for kernel in self._kernels if kernel.left <= 0]
        self._kernels = [kernel for kernel in self._kernels if kernel.left > 0]
        self._arm()
        for kernel in ended:
            kernel.ended(self.now_ps())
