"""Copies on one rank: view to view, by parameter between layouts, or to and from files."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Final

import torch

from zsim.schedule.operation import Copy, Read, View, Write
from zsim.schedule.parameter_copy import Rearrangement, rearrangement
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.observe.watchers import is_watched, unwatched

JOINED: Final = 1 << 17
"""Elements of a copy up to which its pieces are put together first: calls cost more than bytes.

Half a megabyte is in the cache of a core when it is divided, where that is a second pass.
"""


@dataclass(slots=True)
class Copier:
    """Does copies; what one moves by parameter is found once and kept."""

    memory: LiveMemory
    _found: dict[str, Rearrangement] = field(default_factory=dict[str, Rearrangement])

    def run(self, copy: Copy) -> None:
        """Do what `copy` says, now, on the current stream."""
        self.bound(copy)()

    def bound(self, copy: Copy) -> Callable[[], None]:
        """Return what does the copy in the memory that its buffers have now."""
        memory = self.memory
        match copy:
            case Read(source=source, target=target):
                there = memory.window(source)
                return partial(
                    there.file.read, there.offset, memory.flat(target), memory.room(target)
                )
            case Write(source=source, target=target):
                there = memory.window(target)
                return partial(there.file.write, there.offset, memory.flat(source), there.room)
            case _:
                if pieces := self._joined(copy):
                    return partial(_join, pieces, memory.flat(copy.target), copy)
                moves = self._by_parameter(copy) if copy.by_parameter else self._whole(copy)
                return partial(_move_all, list(moves), copy)

    def _joined(self, copy: Copy) -> list[torch.Tensor]:
        """Return the pieces of a source that are small, and lie in it without gaps; or nothing."""
        if copy.source.size > JOINED or copy.accumulate or copy.by_parameter:
            return []
        memory = self.memory
        parts = memory.parts(copy.source.buffer)
        if len(parts) < 2 or not memory.is_allocated(copy.target.buffer):
            return []
        start, size = memory.extent(copy.source)
        target, end = memory.part(copy.target.buffer), start
        dtype, device, found = target.dtype, target.device, list[torch.Tensor]()
        for first, piece in sorted(parts, key=itemgetter(0)):
            if first != end or piece.dtype != dtype or piece.device != device:
                return []
            end += piece.numel()
            found.append(piece)
        return found if end == start + size else []

    def _whole(self, copy: Copy) -> "Iterator[_Move]":
        """Part by part; what autograd made may share its storage, and is never scaled in place."""
        if not self.memory.extent(copy.source)[1]:
            return
        for start, source in self.memory.pieces(copy.source):
            if not self.memory.is_allocated(copy.target.buffer):
                self.memory.own(copy.target)
            yield source, self.memory.shaped(copy.target, source.shape, start)

    def _by_parameter(self, copy: Copy) -> "Iterator[_Move]":
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
            yield (
                source.unfold(0, rows.size, rows.source_step),
                there.unfold(0, rows.size, rows.target_step),
            )
        for start, size in found.padding:
            yield None, target[start : start + size]


_Move = tuple[torch.Tensor | None, torch.Tensor]
"""What a copy moves and where to; nothing for padding, which becomes zero."""


def _move_all(moves: list[_Move], copy: Copy) -> None:
    for source, target in moves:
        if source is None:
            target.zero_()
        elif copy.accumulate:
            target.add_(source, alpha=1 / copy.divisor)
        elif copy.divisor == 1:
            target.copy_(source, non_blocking=True)  # the stream waits, not the host
        elif (source.dtype, source.device) == (target.dtype, target.device) and (
            source.is_contiguous() and target.is_contiguous()
        ):
            # In one pass, to the same bits.
            torch.div(source, _divisor(copy.divisor, target), out=target)
        else:
            target.copy_(source).div_(copy.divisor)


def _join(pieces: list[torch.Tensor], target: torch.Tensor, copy: Copy) -> None:
    """Put small pieces one behind the other, by one call of torch and one that divides."""
    torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in pieces], out=target)
    if copy.divisor != 1:
        target.div_(_divisor(copy.divisor, target))


_WIDE: Final = (torch.float32, torch.float64)
_EXACT_BITS: Final = 24
"""Of whole numbers that fp32 has."""

_DIVISORS: Final[dict[tuple[int, torch.dtype], torch.Tensor]] = {}
"""Divisors on the CPU: torch makes a tensor of a number in each call, which takes longer."""


def _divisor(divisor: int, target: torch.Tensor) -> torch.Tensor | int:
    """Return what divides `target`: a tensor that is there, or the number."""
    is_exact = target.dtype in _WIDE and divisor.bit_length() <= _EXACT_BITS
    if not is_exact or not target.is_cpu or is_watched():
        return divisor
    found = _DIVISORS.get((divisor, target.dtype))
    if found is None:
        with unwatched():
            found = torch.tensor(divisor, dtype=target.dtype)
        _DIVISORS[divisor, target.dtype] = found
    return found
