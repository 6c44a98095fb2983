"""Memory of single tensors while a segment runs, allocated and freed in order.

A schedule has one buffer for all that a segment saves, one for its workspace, one for the gradients
of its parameters. An allocator sees tensors, one by one: an allocation trace says when.
"""

from dataclasses import dataclass
from functools import lru_cache

OWN = 0
"""The segment's workspace, which the buffer that has the trace stands for."""

AllocationEvent = tuple[int, int, int]
"""Of which buffer, which of its tensors, and bytes: taken, or with a minus given back.

Buffers are counted from 1, `OWN` aside. Of 0 bytes a tensor is given back unless its buffer is
alive: what a checkpointed forward does not keep.
"""


class LifetimeError(ValueError):
    """An allocation trace that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """An allocation trace: what is taken and given back once its buffer is allocated.

    Attributes:
        buffers: by number, from 1 on, the buffers whose tensors take turns; "" is none, and its
            turns are void.
    """

    buffers: tuple[str, ...]
    turns: tuple[AllocationEvent, ...]

    def __post_init__(self) -> None:
        low, high, unbalanced = _looked_at(self.turns)
        if not 0 <= low <= high <= len(self.buffers):
            raise LifetimeError(
                f"course: a turn must be of one of {len(self.buffers)} buffers, or 0"
            )
        if unbalanced:
            raise LifetimeError(unbalanced)

    def name(self, number: int, own: str) -> str:
        """Return the buffer with this number in the trace of the buffer `own`."""
        return own if number == OWN else self.buffers[number - 1]


@lru_cache(maxsize=1024)
def _looked_at(turns: tuple[AllocationEvent, ...]) -> tuple[int, int, str]:
    """Return the least and the largest number of a buffer, and what is wrong with the balance.

    Tensors are taken once at a time, and given back as large as they were taken. Those of other
    buffers may be given back that an earlier trace took, own ones may not. Many traces have the
    same turns, of the buffers of other micro-batches.
    """
    numbers = [turn[0] for turn in turns] or [OWN]
    return min(numbers), max(numbers), _unbalanced(turns)


def _unbalanced(turns: tuple[AllocationEvent, ...]) -> str:
    """Return the first turn that takes a tensor twice, or gives back another than was taken."""
    held: dict[tuple[int, int], int] = {}
    for number, tensor, size in turns:
        key = (number, tensor)
        if size > 0:
            if key in held:
                return f"course: tensor {tensor} of buffer {number} is taken twice"
            held[key] = size
        elif size < 0:
            taken = held.pop(key, 0 if number == OWN else -size)
            if taken != -size:
                return (
                    f"course: tensor {tensor} of buffer {number} gives back {-size} bytes "
                    f"where {taken} were taken"
                )
    return ""
