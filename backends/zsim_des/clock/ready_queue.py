"""The ready queue: walkers that may advance, first come first served, and alarms."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol


class Walker(Protocol):
    """A host or a stream: advances until it needs a time that is not known yet."""

    def advance(self) -> None:
        """Advance as far as possible."""
        ...


class Clock:
    """Simulated time in picoseconds, and alarms, which are functions called at their times.

    Alarms at the same time ring in the order in which they were set; late alarms ring last.
    """

    def __init__(self) -> None:
        self.now = 0
        self._alarms: list[tuple[int, bool, int, Callable[[], None]]] = []
        self._set = 0

    @property
    def has_alarms(self) -> bool:
        """Return True if an alarm has not rung."""
        return bool(self._alarms)

    def at(self, time_ps: int, act: Callable[[], None], *, late: bool = False) -> None:
        """Call `act` at `time_ps`."""
        self._set = number = self._set + 1
        heappush(self._alarms, (time_ps, late, number, act))

    def ring_all(self) -> None:
        """Ring all alarms, including alarms that others set."""
        alarms = self._alarms
        while alarms:
            self.now, _, _, act = heappop(alarms)
            act()

    def ring_some(self, count: int) -> None:
        """Ring at most `count` alarms."""
        alarms = self._alarms
        for _ in range(count):
            if not alarms:
                break
            self.now, _, _, act = heappop(alarms)
            act()


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

        self.env.at(time_ps, alarm, late=True)

    def at(self, time_ps: int, act: Callable[[], None]) -> None:
        """Call `act` at `time_ps`, now or later, then let the walkers advance that it wakes."""

        def alarm() -> None:
            act()
            self.run()

        self.env.at(time_ps, alarm)
