"""The trained parameters, whole, from the shards that the ranks hold."""

import torch
from torch import distributed

from zsim.layout import Layout
from zsim.schedule import Buffer, Kind
from zsim_torch.executor import Machine


def collect(machine: Machine) -> dict[str, torch.Tensor]:
    """Every parameter by name, flat, on the CPU: from masters where there are some.

    Every rank calls it.
    """
    found: dict[str, torch.Tensor] = {}
    for buffer in _holders(machine):
        assert buffer.layout is not None
        layout = machine.schedule.layout_by_name[buffer.layout]
        whole = _whole(machine, buffer, layout)
        for piece in layout.pieces:
            found[piece.parameter] = whole[piece.start : piece.end].clone()
    return found


def _holders(machine: Machine) -> list[Buffer]:
    """For each layout the persistent buffer that holds its parameters in the widest format."""
    by_layout: dict[str, Buffer] = {}
    for name in machine.program.persistent:
        buffer = machine.program.by_name[name]
        if buffer.layout is None or buffer.kind not in (Kind.PARAMETER, Kind.MASTER):
            continue
        if buffer.layout not in by_layout or buffer.kind is Kind.MASTER:
            by_layout[buffer.layout] = buffer
    return list(by_layout.values())


def _whole(machine: Machine, buffer: Buffer, layout: Layout) -> torch.Tensor:
    held = machine.memory.part(buffer.name)
    if buffer.shard is None:
        return held.cpu()
    mesh = machine.schedule.mesh
    count = mesh.axis_size(buffer.shard)
    shards = [held]
    if distributed.is_initialized():
        shards = [torch.empty_like(held) for _ in range(mesh.size)]
        distributed.all_gather(shards, held)
    whole = torch.zeros(layout.elements, dtype=held.dtype)
    for rank, shard in enumerate(shards):
        start, size = layout.segment(mesh.coordinates(rank)[buffer.shard], count)
        whole[start : start + size] = shard[:size]
    return whole
