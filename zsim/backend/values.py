"""Protocol of the values in a simulated run: exact whole numbers, torch tensors, or others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from zsim.dtype import DType
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Communication, Compute, Copy, Fill
from zsim.schedule.schedule import Program

A = TypeVar("A")
"""One-dimensional array type; a slice of it is a view of the same memory."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of an operation: the rank, its coordinates, and its program."""

    rank: int
    coordinates: Coordinates
    program: Program


class Values(Protocol[A]):
    """Memory of buffers, and the results of operations on it. Unwritten memory is "spoiled"."""

    def memory(self, elements: int, dtype: DType) -> A:
        """Return new memory, marked as unwritten (spoiled)."""
        ...

    def window(self, memory: A, start: int, size: int) -> A:
        """Return a view of `size` elements of `memory` from `start`."""
        ...

    def invalidate(self, window: A) -> None:
        """Mark `window` as unwritten: operations that read it compute wrong values."""
        ...

    def is_invalidated(self, window: A) -> bool:
        """Return True if no element of `window` was written since it was spoiled."""
        ...

    def taken(self, window: A) -> A:
        """Return a copy of `window`."""
        ...

    def same(self, one: A, other: A) -> bool:
        """Return True if both hold the same bits."""
        ...

    def store(self, window: A, value: A) -> None:
        """Write `value` into `window`."""
        ...

    def is_zero(self, window: A) -> bool:
        """Return True if the only element of `window` is zero; False if it is spoiled."""
        ...

    def apply(
        self,
        operation: Compute | Fill | Copy,
        views: Sequence[A],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[A | None]:
        """Compute the values that `operation` writes.

        Args:
            operation: operation to run.
            views: value of each access when the operation started, in the order of
                `zsim.schedule.access`.
            seat: rank that runs it.
            step: number of the step; -1 in setup.
            scalars: values of the host's scalars when it issued the operation.

        Returns:
            The new value of each access that writes; None for each access that only reads.
        """
        ...

    def meet(self, members: Sequence[Communication], sources: Sequence[A]) -> Sequence[A]:
        """Return the result of a collective for each member of a communicator, in order.

        `members` are the operations of the ranks, and `sources` the values that they read. For a
        Send and its Receive, the result of both is the sent value.
        """
        ...
