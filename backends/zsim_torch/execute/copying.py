"""Copies on one rank: view to view, or by parameter between buffers with different layouts."""

from dataclasses import dataclass, field

import torch

from zsim.schedule.operation import Copy, View
from zsim.schedule.parameter_copy import Rearrangement, rearrangement
from zsim_torch.execute.live_memory import LiveMemory


@dataclass(slots=True)
class Copier:
    """Does copies; what one moves by parameter is found once and kept."""

    memory: LiveMemory
    _found: dict[str, Rearrangement] = field(default_factory=dict[str, Rearrangement])

    def run(self, copy: Copy) -> None:
        """Do what `copy` says, now, on the current stream."""
        if copy.by_parameter:
            self._by_parameter(copy)
        elif self.memory.extent(copy.source)[1]:
            self._view_to_view(copy)

    def _view_to_view(self, copy: Copy) -> None:
        """Part by part; what autograd made may share its storage, and is never scaled in place."""
        for start, source in self.memory.pieces(copy.source):
            whole = self.memory.own(copy.target)
            _move(source, whole[start : start + source.numel()].view(source.shape), copy)

    def _by_parameter(self, copy: Copy) -> None:
        memory = self.memory
        found = self._found.get(copy.id)
        if found is None:
            found = self._found[copy.id] = rearrangement(
                memory.schedule, memory.program, copy, memory.coordinates
            )
        target = memory.own(copy.target)
        for rows in found.moves:
            span = (rows.rows - 1) * rows.source_step + rows.size
            source = memory.flat(View(buffer=copy.source.buffer, start=rows.source, size=span))
            there = target[
                rows.target : rows.target + (rows.rows - 1) * rows.target_step + rows.size
            ]
            _move(
                source.unfold(0, rows.size, rows.source_step),
                there.unfold(0, rows.size, rows.target_step),
                copy,
            )
        for start, size in found.padding:
            target[start : start + size].zero_()


def _move(source: torch.Tensor, target: torch.Tensor, copy: Copy) -> None:
    if copy.accumulate:
        target.add_(source, alpha=1 / copy.divisor)
    else:
        target.copy_(source, non_blocking=copy.divisor == 1)  # the stream waits, not the host
        if copy.divisor != 1:
            target.div_(copy.divisor)
