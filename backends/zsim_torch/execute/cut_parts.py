"""Parts of buffers: of those that stay in memory each is cut out once."""

from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple, Protocol

import torch

from zsim.schedule.operation import View


class Kept(Protocol):
    """Holders of parts of buffers that last from step to step."""

    def clear(self) -> None:
        """Hold none any more."""
        ...


_STRIDES: Final[dict[torch.Size, tuple[int, ...]]] = {}


def cut(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return elements of `flat` from `start` on in `shape`, by one call of torch."""
    strides = _STRIDES.get(shape)
    if strides is None:
        sizes = [max(size, 1) for size in shape]
        strides = tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        _STRIDES[shape] = strides
    return flat.as_strided(shape, strides, flat.storage_offset() + start)


class _Cut(NamedTuple):
    """A part, and the view that it was cut from: it is kept, so that no other one has its id."""

    view: View
    tensor: torch.Tensor


@dataclass(slots=True)
class CutParts:
    """Parts of the buffers `staying`, by the `id` of the view and where they begin in it."""

    staying: frozenset[str]
    _by_buffer: dict[str, dict[tuple[int, int], _Cut]] = field(
        default_factory=dict[str, dict[tuple[int, int], _Cut]]
    )
    _tied: dict[str, list[Kept]] = field(default_factory=dict[str, list[Kept]])

    def find(self, view: View, start: int, shape: torch.Size) -> torch.Tensor | None:
        """Return the part of `view` from `start` on in `shape`, if it was kept."""
        cuts = self._by_buffer.get(view.buffer)
        found = None if cuts is None else cuts.get((id(view), start))
        if found is None or found.view is not view or found.tensor.shape != shape:
            return None
        return found.tensor

    def keep(self, view: View, start: int, part: torch.Tensor) -> None:
        """Keep a part if its buffer stays, until that is forgotten."""
        if view.buffer in self.staying:
            self._by_buffer.setdefault(view.buffer, {})[id(view), start] = _Cut(view, part)

    def tie(self, buffer: str, kept: Kept) -> None:
        """Clear `kept`, too, when the parts of a buffer are dropped."""
        tied = self._tied.setdefault(buffer, [])
        if not any(each is kept for each in tied):
            tied.append(kept)

    def forget(self, buffer: str) -> None:
        """Drop the parts of a buffer."""
        self._by_buffer.pop(buffer, None)
        for kept in self._tied.pop(buffer, ()):
            kept.clear()
