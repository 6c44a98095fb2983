"""Kernels that share a GPU with a collective: they take longer while it is there."""

from collections.abc import Generator
from dataclasses import dataclass
from fractions import Fraction

import simpy

Steps = Generator[simpy.Event, None, None]


@dataclass(slots=True)
class Kernel:
    """One under way: picoseconds of work left since the last change, and what ends it."""

    left: Fraction
    ended: simpy.Event


class Beside:
    """The kernels and collectives of one rank, from change to change.

    A collective is there from when the rank reached it, for it waits for its peers on the GPU.
    """

    def __init__(self, env: simpy.Environment, slowdown: Fraction) -> None:
        self._env = env
        self._slowdown = slowdown
        self._collectives = 0
        self._kernels: list[Kernel] = []
        self._changed_ps = 0
        self._version = 0

    def reach(self, at_ps: int) -> Steps:
        """Until `at_ps`."""
        if at_ps > self._env.now:
            yield self._env.timeout(at_ps - int(self._env.now))

    def collective(self, change: int) -> None:
        """A collective has come (1) or gone (-1)."""
        self._advance()
        self._collectives += change
        self._arm()

    def kernel(self, time_ps: int) -> Steps:
        """Work that takes `time_ps` with the GPU to itself, from now until it has ended."""
        kernel = Kernel(Fraction(time_ps), self._env.event())
        self._advance()
        self._kernels.append(kernel)
        self._arm()
        yield kernel.ended

    def _factor(self) -> Fraction:
        return self._slowdown if self._collectives else Fraction(1)

    def _advance(self) -> None:
        now = int(self._env.now)
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
        alarm = self._env.timeout(max(0, -(-wait.numerator // wait.denominator)))
        alarm.callbacks.append(lambda _: self._alarm(version))

    def _alarm(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        ended = [kernel for kernel in self._kernels if kernel.left <= 0]
        self._kernels = [kernel for kernel in self._kernels if kernel.left > 0]
        self._arm()
        for kernel in ended:
            kernel.ended.succeed()
