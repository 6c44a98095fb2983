"""Copy data on one rank: between views, between layouts, and to and from files."""

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
"""Maximum number of elements of a copy whose pieces are concatenated before they are divided.

Calls cost more than bytes here: half a megabyte is still in the core's cache for the division.
"""


@dataclass(slots=True)
class Copier:
    """Runs copies; computes the moves of a copy between layouts once."""

    memory: LiveMemory
    _found: dict[str, Rearrangement] = field(default_factory=dict[str, Rearrangement])

    def run(self, copy: Copy) -> None:
        """Run `copy` now, on the current stream."""
        self.bound(copy)()

    def bound(self, copy: Copy) -> Callable[[], None]:
        """Return a function that runs the copy in the memory that its buffers have now."""
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
                moves = self._by_parameter(copy) if copy.by_parameter else self._part_moves(copy)
                return partial(_move_all, list(moves), copy)

    def _joined(self, copy: Copy) -> list[torch.Tensor]:
        """Return the pieces of a small source without gaps; an empty list for any other source."""
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

    def _part_moves(self, copy: Copy) -> "Iterator[_Move]":
        """Yield the moves of a copy, part by part.

        Parts made by autograd may share their storage, so they are never scaled in place.
        """
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
"""Source and target of a move; without a source the target is padding and becomes zero."""


def _move_all(moves: list[_Move], copy: Copy) -> None:
    for source, target in moves:
        if source is None:
            target.zero_()
        elif copy.accumulate:
            share = 1 if copy.divisor == 1 else 1 / copy.divisor  # integers allow no fraction
            target.add_(source, alpha=share)
        elif copy.divisor == 1:
            target.copy_(source, non_blocking=True)  # the stream waits, not the host
        elif (source.dtype, source.device) == (target.dtype, target.device) and (
            source.is_contiguous() and target.is_contiguous()
        ):
            # One pass, with bitwise the same result.
            torch.div(source, _divisor(copy.divisor, target), out=target)
        else:
            target.copy_(source).div_(copy.divisor)


def _join(pieces: list[torch.Tensor], target: torch.Tensor, copy: Copy) -> None:
    """Concatenate small pieces into `target` by one call of torch, then divide."""
    torch.cat([each if each.dim() == 1 else each.reshape(-1) for each in pieces], out=target)
    if copy.divisor != 1:
        target.div_(_divisor(copy.divisor, target))


_WIDE: Final = (torch.float32, torch.float64)
_EXACT_BITS: Final = 24
"""Significand bits of fp32: larger integers may not be exact."""

_DIVISORS: Final[dict[tuple[int, torch.dtype], torch.Tensor]] = {}
"""Divisors as CPU tensors: torch would create a tensor from a number in each call."""


def _divisor(divisor: int, target: torch.Tensor) -> torch.Tensor | int:
    """Return the divisor for `target`: a cached tensor, or the number itself."""
    is_exact = target.dtype in _WIDE and divisor.bit_length() <= _EXACT_BITS
    if not is_exact or not target.is_cpu or is_watched():
        return divisor
    found = _DIVISORS.get((divisor, target.dtype))
    if found is None:
        with unwatched():
            found = torch.tensor(divisor, dtype=target.dtype)
        _DIVISORS[divisor, target.dtype] = found
    return found
