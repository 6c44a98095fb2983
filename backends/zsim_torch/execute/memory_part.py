"""Memory of buffers outside allocations: produced by autograd, freed, or in a file."""

import time
import weakref
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from zsim_torch.execute.host_memory import FileRange, HostBlock
from zsim_torch.execute.range_file import RangeFile

_SETTLE_S: Final = 0.2
"""Maximum seconds to wait for a freed storage that a Gloo thread still holds.

The wait usually takes microseconds.
"""


class ProducedPart(NamedTuple):
    """Elements of a produced buffer from `start`, as autograd made them."""

    start: int
    tensor: torch.Tensor

    @property
    def end(self) -> int:
        """Return the index after the last element of the part."""
        return self.start + self.tensor.numel()


@dataclass(slots=True)
class Remains:
    """Memory of a freed buffer; `held` is set if it was in host memory or in a file."""

    flat: torch.Tensor | None
    parts: list[ProducedPart]
    held: HostBlock | FileRange | None = None


class FileWindow(NamedTuple):
    """`size` bytes of a file from `offset`, followed by `room` unused bytes."""

    file: RangeFile
    offset: int
    size: int
    room: int


def settle(storage: "weakref.ref[torch.UntypedStorage]") -> None:
    """Wait until a storage is released, but at most `_SETTLE_S` seconds."""
    deadline = time.perf_counter() + _SETTLE_S
    while storage() is not None and time.perf_counter() < deadline:
        time.sleep(0)


def invalidate(tensor: torch.Tensor) -> None:
    """Fill `tensor` with NaN, or with the largest integer, so that invalid reads show."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
