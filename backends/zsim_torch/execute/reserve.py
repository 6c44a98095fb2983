"""Memory of large buffers on a CPU, which serves another buffer of its size when one is freed.

The C library gives large blocks back to the kernel when they are freed, and each page of a new one
is then a fault, and is filled with zeros: 78,000 faults in a step of 100 million parameters. A
GPU has the allocator of torch for it.

A block is free when nobody holds a tensor on it any more: neither the executor, nor autograd, nor a
thread of Gloo. Each use is a storage of its own, which ends with it. Blocks together never have
more bytes than buffers have needed at a time.
"""

import sys
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

LARGE_BYTES: Final = 128 << 10
"""Blocks from which on glibc asks the kernel for each (mallopt(3), M_MMAP_THRESHOLD)."""

ALIGNMENT: Final = 64
"""Of memory that torch allocates on a CPU (`gAlignment` in c10/core/alignment.h)."""


@dataclass(slots=True, eq=False)
class _ReservedBlock:
    """Memory as numpy has it: a tensor on it counts among the references to `held`."""

    held: "np.ndarray[Any, np.dtype[np.uint8]]"
    size: int

    @property
    def is_free(self) -> bool:
        """Return whether no tensor is on it: there is this reference, and that of the call."""
        return sys.getrefcount(self.held) == 2


@dataclass(slots=True)
class Reserve:
    """Blocks, those used last behind."""

    peak_bytes: int = 0
    _blocks: list[_ReservedBlock] = field(default_factory=list[_ReservedBlock])

    def take(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory on the CPU for a buffer, with whatever is in it."""
        size = elements * dtype.itemsize
        if size < LARGE_BYTES:
            return torch.empty(elements, dtype=dtype)
        return torch.from_numpy(self._block(size).held).view(dtype)

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, used or free."""
        return sum(block.size for block in self._blocks)

    def _block(self, size: int) -> _ReservedBlock:
        free = [block for block in self._blocks if block.is_free]
        found = next((block for block in free if block.size == size), None)
        if found is not None:
            self._blocks.remove(found)
        else:
            total = self.bytes
            used = total - sum(block.size for block in free)
            self.peak_bytes = max(self.peak_bytes, used + size)
            for block in free:
                if total + size > self.peak_bytes:
                    self._blocks.remove(block)
                    total -= block.size
            found = _ReservedBlock(_aligned(size), size)
        self._blocks.append(found)
        return found


def _aligned(size: int) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Return memory aligned as that of torch: kernels may round otherwise if it is not."""
    room = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]
