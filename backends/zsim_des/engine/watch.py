"""Hooks into a simulated run: a watcher observes it, `Durations` overrides how long things take."""

from typing import Protocol

from zsim.schedule.operation import Operation
from zsim_des.engine.instruction import Enqueue


class RunWatcher(Protocol):
    """Observes every action of every host, and every entry of every stream.

    Calls come in an order that the schedule allows: dependencies of an entry are reported before
    it. Times of calls need not ascend, since ends that are known ahead are reported ahead. `rank`
    is the number of a rank; in a folded run, of the rank that represents its class.
    """

    def act(self, rank: int, step: int, operation: Operation, host_ps: int) -> None:
        """Observe a host action that is not a stream entry, after any wait of the host."""
        ...

    def put(self, rank: int, step: int, entry: Enqueue, host_ps: int) -> None:
        """Observe the host put `entry` on its stream."""
        ...

    def end(self, rank: int, step: int, slot: int, span_ps: tuple[int, int]) -> None:
        """Observe the start and end of the entry of `slot`: `span_ps`."""
        ...


class Durations(Protocol):
    """Times of all operations, in place of the cluster's times. Picoseconds, 0 or more."""

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        """Return the time of the host of `rank` to put an operation on its stream."""
        ...

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        """Return the time of a kernel, or of a stream that waits for the uses of a free."""
        ...

    def communication_ps(self, step: int, operation: str) -> int:
        """Return the time from the last arrival to the end; the name is of the first entry."""
        ...
