"""Values that a simulated run can carry: exact whole numbers, torch tensors, or others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from zsim.dtype import DType
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Communication, Compute, Copy, Fill
from zsim.schedule.schedule import Program

A = TypeVar("A")
"""Numbers in a row: a slice of it is a window on the same memory."""


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of an operation: the rank, its coordinates, and its program."""

    rank: int
    coordinates: Coordinates
    program: Program


class Values(Protocol[A]):
    """Memory that can be spoiled, and what operations make of what they read."""

    def memory(self, elements: int, dtype: DType) -> A:
        """Return new memory, spoiled."""
        ...

    def window(self, memory: A, start: int, size: int) -> A:
        """Elements `start` on of `memory`: the same memory."""
        ...

    def spoil(self, window: A) -> None:
        """Whoever reads `window` now computes nonsense."""
        ...

    def is_spoiled(self, window: A) -> bool:
        """Return whether nobody wrote any of `window` since it was spoiled."""
        ...

    def taken(self, window: A) -> A:
        """Return a copy."""
        ...

    def same(self, one: A, other: A) -> bool:
        """Return whether both hold the same bits."""
        ...

    def store(self, window: A, value: A) -> None:
        """`window` becomes `value`."""
        ...

    def is_zero(self, window: A) -> bool:
        """Return whether the only element is zero: not so if it is spoiled."""
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
        """Return what `operation` writes.

        Args:
            operation: what runs.
            views: what each of its accesses held when it began, in the order of
                `zsim.schedule.access`.
            seat: where it runs.
            step: in which step; -1 in setup.
            scalars: of the host, when it issued the operation.

        Returns:
            For each access that writes its new value, else None.
        """
        ...

    def meet(self, members: Sequence[Communication], sources: Sequence[A]) -> Sequence[A]:
        """Return what each member of a communicator gets, in their order.

        `members` are what each rank brings, `sources` what each read; a pair is a Send and a
        Receive, and both get what was sent.
        """
        ...
