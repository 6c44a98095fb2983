"""Select a rank's share of a norm over all ranks."""

from collections.abc import Iterator

import torch

from zsim.schedule.operation import View
from zsim.schedule.parameter_copy import held
from zsim_torch.execute.live_memory import LiveMemory


def counted(memory: LiveMemory, view: View) -> Iterator[torch.Tensor]:
    """Yield the elements that this rank adds to a norm; only the first of equal copies counts."""
    schedule, coordinates = memory.schedule, memory.coordinates
    flat, buffer = memory.flat(view), memory.program.by_name[view.buffer]
    layout = schedule.layout_by_name.get(buffer.layout or "")
    others = {
        piece.parameter
        for piece in (layout.pieces if layout is not None else ())
        if any(coordinates.get(axis) for axis in piece.copies)
    }
    if not others:
        yield flat
        return
    start = memory.extent(view)[0]
    for part in held(schedule, buffer, coordinates):
        low = max(start, part.position) - start
        high = min(start + flat.numel(), part.position + part.size) - start
        if low < high and part.parameter not in others:
            yield flat[low:high]
