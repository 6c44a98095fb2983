"""Hooks into a simulated run: a watcher observes it, `Durations` overrides how long things take."""

from typing import Protocol

from zsim.schedule.operation import Operation
from zsim_des.engine.instruction import Enqueue


class RunWatcher(Protocol):
    """Is told of every action of every host, and of every entry of every stream.

    Calls come in an order that the schedule allows: whatever an entry had to wait for has been
    told before. Times of calls need not ascend: what is known ahead is told ahead. `rank` is the
    number of a rank; of a folded run, of the one that stands for its class.
    """

    def act(self, rank: int, step: int, operation: Operation, host_ps: int) -> None:
        """Note an action of the host that is no entry: after it waited, if it had to."""
        ...

    def put(self, rank: int, step: int, entry: Enqueue, host_ps: int) -> None:
        """Note that the host puts `entry` on its stream."""
        ...

    def end(self, rank: int, step: int, slot: int, span_ps: tuple[int, int]) -> None:
        """Note when the entry of `slot` starts and ends: `span_ps`."""
        ...


class Durations(Protocol):
    """Durations of everything, in place of what the cluster says. Any times from 0 up."""

    def issue_ps(self, rank: int, step: int, operation: str) -> int:
        """Time that the host of `rank` takes to put an operation on its stream."""
        ...

    def kernel_ps(self, rank: int, step: int, operation: str) -> int:
        """Time that a kernel takes, or a stream that waits for the uses of a free."""
        ...

    def communication_ps(self, step: int, operation: str) -> int:
        """Time from when the last rank is there until all are done; the name is the first's."""
        ...
