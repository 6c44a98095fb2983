"""Parts of buffers that stay in memory, each cut out once."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from zsim.schedule.operation import View


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

    def forget(self, buffer: str) -> None:
        """Drop the parts of a buffer."""
        self._by_buffer.pop(buffer, None)
