"""Memory of single tensors while a segment runs, allocated and freed in order.

A schedule has one buffer for all that a segment saves, one for its workspace, one for the gradients
of its parameters. An allocator sees tensors, one by one: an allocation trace says when.
"""

from dataclasses import dataclass

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
        numbers = [turn[0] for turn in self.turns]
        if numbers and not 0 <= min(numbers) <= max(numbers) <= len(self.buffers):
            raise LifetimeError(
                f"course: a turn must be of one of {len(self.buffers)} buffers, or 0"
            )
        self._need_balance()

    def _need_balance(self) -> None:
        """Return if tensors are taken once at a time, and given back as large as they were taken.

        Those of other buffers may be given back that an earlier trace took, own ones may not.

        Raises:
            LifetimeError: one is not.
        """
        held: dict[tuple[int, int], int] = {}
        for number, tensor, size in self.turns:
            key = (number, tensor)
            if size > 0:
                if key in held:
                    raise LifetimeError(
                        f"course: tensor {tensor} of buffer {number} is taken twice"
                    )
                held[key] = size
            elif size < 0:
                taken = held.pop(key, 0 if number == OWN else -size)
                if taken != -size:
                    raise LifetimeError(
                        f"course: tensor {tensor} of buffer {number} gives back {-size} bytes "
                        f"where {taken} were taken"
                    )

    def name(self, number: int, own: str) -> str:
        """Return the buffer with this number in the trace of the buffer `own`."""
        return own if number == OWN else self.buffers[number - 1]
