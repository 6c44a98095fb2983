"""The ready queue: who may go on, first come first served, and what is done at a later time."""

from collections import deque
from collections.abc import Callable
from heapq import heappop
from typing import Protocol

import simpy
from simpy.events import NORMAL, EventPriority

LATE = EventPriority(NORMAL + 1)
"""Of what happens at a time after everything else that does."""


class Walker(Protocol):
    """A host or a stream: goes on until something that it needs is not known."""

    def advance(self) -> None:
        """Go on as far as possible."""
        ...


class Clock(simpy.Environment):
    """Simulated time, of which all events are alarms."""

    def ring_all(self) -> None:
        """Let all alarms ring, as `run` does: without looking for what no alarm is or does."""
        queue = self._queue
        while queue:
            self._now, _, _, event = heappop(queue)
            assert isinstance(event, Alarm)
            event.act()


class Alarm(simpy.Event):
    """Something that is done at a later time. A timeout that nobody waits for, and cheaper."""

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
"""Callbacks of an alarm, the same list for all."""


class Agenda:
    """Walkers that have been woken. Nobody goes on inside another one's step."""

    def __init__(self, env: Clock) -> None:
        self.env = env
        self._woken: deque[Walker] = deque()
        self._runs = False

    def wake(self, walker: Walker) -> None:
        """`walker` may be able to go on: it will at the next `run`, or in the one under way."""
        self._woken.append(walker)

    def run(self) -> None:
        """Let all that are woken go on, and those that these wake."""
        if self._runs:
            return
        self._runs = True
        woken = self._woken
        while woken:
            woken.popleft().advance()
        self._runs = False

    def wake_after(self, time_ps: int, walker: Walker) -> None:
        """Let `walker` go on when all that happens at `time_ps` is known."""

        def alarm() -> None:
            self.wake(walker)
            self.run()

        Alarm(self.env, time_ps - int(self.env.now), alarm, LATE)

    def at(self, time_ps: int, act: Callable[[], None]) -> None:
        """Do something at `time_ps`, now or later, then let go on whom it wakes."""

        def alarm() -> None:
            act()
            self.run()

        Alarm(self.env, time_ps - int(self.env.now), alarm)
