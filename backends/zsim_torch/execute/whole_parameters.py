"""The trained parameters, whole, from the shards that the ranks hold."""

from collections.abc import Sequence

import torch
from torch import distributed

from zsim.schedule.layout import Fragment, Layout
from zsim.schedule.parameter_copy import held
from zsim.schedule.schedule import Buffer, Kind
from zsim_torch.execute.executor import RankMachine


def collect(machine: RankMachine) -> dict[str, torch.Tensor]:
    """Every parameter by name, flat, on the CPU: from masters where there are some.

    Every rank calls it. Of ranks that hold the same the last is believed; of a whole buffer each
    rank is believed in its own segment, which it updates: a step may end before others have it.
    """
    found: dict[str, torch.Tensor] = {}
    for buffer in _holders(machine):
        assert buffer.layout is not None
        layout = machine.schedule.layout_by_name[buffer.layout]
        parts = _parts(machine, buffer, layout)
        for piece in layout.pieces:
            found[piece.parameter] = torch.zeros(piece.size, dtype=parts[0][1].dtype)
        for fragments, part in parts:
            for parameter, offset, position, size in fragments:
                found[parameter][offset : offset + size] = part[position : position + size]
    return found


def _holders(machine: RankMachine) -> list[Buffer]:
    """Return persistent buffers that hold parameters, those that hold masters last."""
    buffers = [machine.program.by_name[name] for name in machine.program.persistent]
    return [
        buffer
        for kind in (Kind.PARAMETER, Kind.MASTER)
        for buffer in buffers
        if buffer.kind is kind and buffer.layout is not None
    ]


def _parts(
    machine: RankMachine, buffer: Buffer, layout: Layout
) -> list[tuple[Sequence[Fragment], torch.Tensor]]:
    """Return each rank's part of `buffer`, and which parts of parameters that is."""
    schedule, mine = (
        machine.schedule,
        machine.memory.left(buffer.name).to(machine.memory.setting.device),
    )
    axis = buffer.shard or layout.axis
    if axis is None or (layout.cuts is not None and buffer.shard is None):
        return [(tuple(held(schedule, buffer, machine.coordinates)), mine.cpu())]
    mesh = schedule.mesh
    count = mesh.axis_size(axis)
    if buffer.shard is None:
        start, size = layout.segment(machine.coordinates[axis], count)
        mine = mine[start : start + size]
    if not distributed.is_initialized():
        return [(tuple(layout.fragments(count, machine.coordinates[axis])), mine.cpu())]
    segments = [torch.empty_like(mine) for _ in range(mesh.size)]
    distributed.all_gather(segments, mine.contiguous())
    return [
        (tuple(layout.fragments(count, mesh.coordinates(rank)[axis])), segment.cpu())
        for rank, segment in enumerate(segments)
    ]
