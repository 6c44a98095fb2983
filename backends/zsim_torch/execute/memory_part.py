"""Memory that buffers have beside an allocation: what autograd made, what is freed, in a file."""

import time
import weakref
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from zsim_torch.execute.host_memory import FileRange, HostBlock
from zsim_torch.execute.range_file import RangeFile

_SETTLE_S: Final = 0.2
"""Seconds to wait at most for a freed storage that a thread of Gloo still holds; a few us do."""


class ProducedPart(NamedTuple):
    """Elements `start` on of a produced buffer, as autograd made them."""

    start: int
    tensor: torch.Tensor

    @property
    def end(self) -> int:
        """First element past the part."""
        return self.start + self.tensor.numel()


@dataclass(slots=True)
class Remains:
    """Facts of a freed buffer: `held` is there where its memory was the host's, or in a file."""

    flat: torch.Tensor | None
    parts: list[ProducedPart]
    held: HostBlock | FileRange | None = None


class FileWindow(NamedTuple):
    """Bytes of a file from `offset` on, and `room` bytes behind them that no buffer has."""

    file: RangeFile
    offset: int
    size: int
    room: int


def settle(storage: "weakref.ref[torch.UntypedStorage]") -> None:
    """Wait until a storage is gone, or for so long that nobody will let go of it."""
    deadline = time.perf_counter() + _SETTLE_S
    while storage() is not None and time.perf_counter() < deadline:
        time.sleep(0)


def spoil(tensor: torch.Tensor) -> None:
    """Fill `tensor` so that whoever reads it sees it: not a number, or the largest integer."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
