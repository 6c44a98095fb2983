"""Cache views of parts of buffers that stay in memory."""

from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple, Protocol

import torch

from zsim.schedule.operation import View


class Kept(Protocol):
    """A holder of views of buffers, which last from step to step."""

    def clear(self) -> None:
        """Drop all views."""
        ...


_STRIDES: Final[dict[torch.Size, tuple[int, ...]]] = {}


def cut(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return elements of `flat` from `start` in `shape`, by one call of torch."""
    strides = _STRIDES.get(shape)
    if strides is None:
        sizes = [max(size, 1) for size in shape]
        strides = tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        _STRIDES[shape] = strides
    return flat.as_strided(shape, strides, flat.storage_offset() + start)


class _Cut(NamedTuple):
    """A part and the view that it was cut from; keeping the view keeps its `id` unique."""

    view: View
    tensor: torch.Tensor


@dataclass(slots=True)
class CutParts:
    """Parts of the buffers `staying`, by the `id` of the view and the start in the view."""

    staying: frozenset[str]
    _by_buffer: dict[str, dict[tuple[int, int], _Cut]] = field(
        default_factory=dict[str, dict[tuple[int, int], _Cut]]
    )
    _tied: dict[str, list[Kept]] = field(default_factory=dict[str, list[Kept]])

    def find(self, view: View, start: int, shape: torch.Size) -> torch.Tensor | None:
        """Return the cached part of `view` from `start` in `shape`, or None."""
        cuts = self._by_buffer.get(view.buffer)
        found = None if cuts is None else cuts.get((id(view), start))
        if found is None or found.view is not view or found.tensor.shape != shape:
            return None
        return found.tensor

    def keep(self, view: View, start: int, part: torch.Tensor) -> None:
        """Cache a part until `forget`, if its buffer stays in memory."""
        if view.buffer in self.staying:
            self._by_buffer.setdefault(view.buffer, {})[id(view), start] = _Cut(view, part)

    def tie(self, buffer: str, kept: Kept) -> None:
        """Also clear `kept` when the parts of `buffer` are dropped."""
        tied = self._tied.setdefault(buffer, [])
        if not any(each is kept for each in tied):
            tied.append(kept)

    def forget(self, buffer: str) -> None:
        """Drop the parts of a buffer."""
        self._by_buffer.pop(buffer, None)
        for kept in self._tied.pop(buffer, ()):
            kept.clear()
