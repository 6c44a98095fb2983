"""The ready queue: walkers that may advance, first come first served, and alarms."""

from collections import deque
from collections.abc import Callable
from heapq import heappop
from typing import Protocol

import simpy
from simpy.events import NORMAL, EventPriority

LATE = EventPriority(NORMAL + 1)
"""Priority of alarms that ring after all others at the same time."""


class Walker(Protocol):
    """A host or a stream: advances until it needs a time that is not known yet."""

    def advance(self) -> None:
        """Advance as far as possible."""
        ...


class Clock(simpy.Environment):
    """Simulated time; all its events are alarms."""

    def ring_all(self) -> None:
        """Ring all alarms, like `run`, but without the checks that alarms do not need."""
        queue = self._queue
        while queue:
            self._now, _, _, event = heappop(queue)
            assert isinstance(event, Alarm)
            event.act()


class Alarm(simpy.Event):
    """Calls `act` at a later time. Like a timeout without waiters, but cheaper."""

    __slots__ = ("act",)

    def __init__(
        self,
        env: simpy.Environment,
        delay_ps: int,
        act: Callable[[], None],
        priority: EventPriority = NORMAL,
    ) -> None:
        self.env = env
        self.callbacks = RING
        self.act = act
        self._value = None
        self._ok = True
        env.schedule(self, priority, delay_ps)


def _ring(alarm: simpy.Event) -> None:
    assert isinstance(alarm, Alarm)
    alarm.act()


RING: list[Callable[[simpy.Event], None]] = [_ring]
"""Callbacks of an alarm; all alarms share this list."""


class Agenda:
    """Walkers that have been woken. A walker never advances inside another one's step."""

    def __init__(self, env: Clock) -> None:
        self.env = env
        self._woken: deque[Walker] = deque()
        self._runs = False

    def wake(self, walker: Walker) -> None:
        """Let `walker` advance at the next `run`, or in the one in progress."""
        self._woken.append(walker)

    def run(self) -> None:
        """Let all woken walkers advance, and those that they wake."""
        if self._runs:
            return
        self._runs = True
        woken = self._woken
        while woken:
            woken.popleft().advance()
        self._runs = False

    def wake_after(self, time_ps: int, walker: Walker) -> None:
        """Wake `walker` after all other events at `time_ps`."""

        def alarm() -> None:
            self.wake(walker)
            self.run()

        Alarm(self.env, time_ps - int(self.env.now), alarm, LATE)

    def at(self, time_ps: int, act: Callable[[], None]) -> None:
        """Call `act` at `time_ps`, now or later, then let the walkers advance that it wakes."""

        def alarm() -> None:
            act()
            self.run()

        Alarm(self.env, time_ps - int(self.env.now), alarm)
