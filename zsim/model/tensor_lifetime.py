"""Memory of single tensors while a segment runs, allocated and freed in order.

A schedule has one buffer for all tensors that a segment saves, one for its workspace, and one for
the gradients of its parameters. An allocator sees single tensors: an allocation trace lists them.
"""

from dataclasses import dataclass
from functools import lru_cache

OWN = 0
"""The segment's workspace: the buffer to which the trace belongs."""

AllocationEvent = tuple[int, int, int]
"""Buffer number, tensor number in it, and bytes: positive to allocate, negative to free.

Buffers are counted from 1, except `OWN`. 0 bytes free a tensor unless its buffer is alive: the
tensors that a checkpointed forward does not keep.
"""


class LifetimeError(ValueError):
    """An allocation trace that is not valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationTrace:
    """Allocations and frees of tensors, from the allocation of their buffer on.

    Attributes:
        buffers: by number, from 1 on, the buffers of the tensors in `turns`; turns of buffer "" are
            ignored.
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
    """Return the smallest and the largest buffer number, and any imbalance.

    A tensor is allocated once at a time, and freed with the same size. Tensors of other buffers may
    be freed that an earlier trace allocated, but not tensors of `OWN`. Cached, since many traces
    share the turns and differ in the micro-batch of the buffers.
    """
    numbers = [turn[0] for turn in turns] or [OWN]
    return min(numbers), max(numbers), _unbalanced(turns)


def _unbalanced(turns: tuple[AllocationEvent, ...]) -> str:
    """Return the first turn that allocates a tensor twice, or frees another size; "" if none."""
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
