"""Read parameters, masters and moments of all ranks between two steps, shard by shard.

A rank updates only its own segment of a buffer, so only that segment is read from it: a step may
end before other ranks have gathered it. If a parameter has a master, the master is read.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import distributed

from zsim.schedule.layout import Fragment
from zsim.schedule.mesh import Coordinates
from zsim.schedule.parameter_copy import held
from zsim.schedule.schedule import Buffer, Kind, Program
from zsim.zero.names import EXPERT, EXPERT_TENSOR, TENSOR
from zsim_torch.execute.collectives import OwnGroup
from zsim_torch.execute.executor import RankMachine
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.ground.torch_dtype import TORCH_DTYPE


class OwnPart(NamedTuple):
    """The part of a buffer that is valid on its rank.

    Positions of fragments count from `start`, the first of `size` elements of the buffer.
    """

    fragments: Sequence[Fragment]
    start: int
    size: int


class StateMemory:
    """Persistent buffers as flat tensors; of those in files, one at a time is in memory."""

    def __init__(self, memory: LiveMemory) -> None:
        self._memory = memory
        self._staged: tuple[str, torch.Tensor] | None = None

    def flat(self, name: str) -> torch.Tensor:
        """Return all elements of a buffer; changes to a buffer in a file take effect on `flush`."""
        if not self._memory.is_in_file(name):
            return self._memory.part(name)
        if self._staged is None or self._staged[0] != name:
            self.flush()
            self._staged = (name, self._memory.left(name))
        return self._staged[1]

    def flush(self) -> None:
        """Write the buffer that is staged in memory back to its file."""
        if self._staged is not None:
            self._memory.put_back(*self._staged)
            self._staged = None


def collect(machine: RankMachine) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter with its name, flat, on the CPU; the master if there is one.

    Every rank calls it, and gets the parameters of all roles, one buffer at a time. If several
    ranks hold a parameter, the last one's value counts. A tensor parallel parameter comes as the
    shard of this rank.
    """
    programs = machine.schedule.programs
    for program in programs:
        for buffer in holders(machine, program):
            if len(programs) == 1:
                found = full_parameters(machine, buffer, machine.memory.left(buffer.name))
            else:
                own = program.role == machine.program.role
                flat = machine.memory.left(buffer.name) if own else None
                found = _joined(machine, buffer, _of_role(machine, buffer, flat, program))
            for name, value in found.items():
                yield name, value.cpu()


def holders(machine: RankMachine, program: Program | None = None) -> list[Buffer]:
    """Return the persistent buffers that hold parameters; by default those of this program."""
    found: dict[str, Buffer] = {}
    for buffer in persistent(machine, Kind.PARAMETER, Kind.MASTER, program=program):
        for piece in machine.schedule.layout_by_name[buffer.layout or ""].pieces:
            found[piece.parameter] = buffer
    return list({buffer.name: buffer for buffer in found.values()}.values())


def persistent(
    machine: RankMachine, *kinds: Kind, program: Program | None = None
) -> Iterator[Buffer]:
    """Yield the persistent buffers of `kinds` that have a layout, kind by kind."""
    program = program or machine.program
    buffers = [program.by_name[name] for name in program.persistent]
    for kind in kinds:
        yield from (each for each in buffers if each.kind is kind and each.layout is not None)


def own_part(machine: RankMachine, buffer: Buffer, rank: int | None = None) -> OwnPart:
    """Return the part of `buffer` that is valid on `rank`, by default this one."""
    schedule = machine.schedule
    coordinates = machine.coordinates if rank is None else schedule.mesh.coordinates(rank)
    layout = schedule.layout_by_name[buffer.layout or ""]
    axis = cut_axis(machine, buffer)
    if axis is None:
        return OwnPart(tuple(held(schedule, buffer, coordinates)), 0, buffer.elements)
    count = schedule.mesh.axis_size(axis)
    start, size = layout.segment(coordinates[axis], count)
    return OwnPart(
        tuple(layout.fragments(count, coordinates[axis])), 0 if buffer.shard else start, size
    )


def cut_axis(machine: RankMachine, buffer: Buffer) -> str | None:
    """Return the axis along which ranks own different parts of `buffer`, or None."""
    layout = machine.schedule.layout_by_name[buffer.layout or ""]
    if layout.cuts is not None and buffer.shard is None:
        return None
    return buffer.shard or layout.axis


def full_parameters(
    machine: RankMachine, buffer: Buffer, flat: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the full parameters in `buffer`, flat, on the device; `flat` is this rank's memory.

    Every rank that has the buffer calls it.
    """
    axis = cut_axis(machine, buffer)
    if axis is None or not distributed.is_initialized():
        own = own_part(machine, buffer)
        part = flat[own.start : own.start + own.size].to(machine.memory.setting.device)
        return _joined(machine, buffer, [(own.fragments, part)])
    parts = _gathered(machine, buffer, flat, program=machine.program, member=along(machine, axis))
    return _joined(machine, buffer, parts)


def along(machine: RankMachine, axis: str) -> OwnGroup:
    """Return the ranks that differ from this one along `axis` only, or else all ranks."""
    mesh = machine.schedule.mesh
    for group in machine.schedule.groups:
        if group.axes == mesh.parts(axis) and group.holds(mesh, machine.coordinates):
            return machine.communicators.member(group.name)
    return _all(machine)


def _all(machine: RankMachine) -> OwnGroup:
    mesh = machine.schedule.mesh
    return OwnGroup(tuple(range(mesh.size)), mesh.rank(machine.coordinates), None)


_Parts = Iterable[tuple[Sequence[Fragment], torch.Tensor]]
"""Parts of ranks, each with the fragments of parameters in it."""


def _of_role(
    machine: RankMachine, buffer: Buffer, flat: torch.Tensor | None, program: Program
) -> _Parts:
    """Yield the parts of the ranks of `program`; every rank calls it, others send zeros."""
    if flat is None:
        flat = torch.zeros(buffer.elements, dtype=TORCH_DTYPE[buffer.dtype])
    return _gathered(machine, buffer, flat, program=program, member=_all(machine))


def _gathered(
    machine: RankMachine, buffer: Buffer, flat: torch.Tensor, *, program: Program, member: OwnGroup
) -> Iterator[tuple[Sequence[Fragment], torch.Tensor]]:
    """Yield the parts of the ranks of `member` that run `program` and share this rank's place."""
    schedule, own = machine.schedule, own_part(machine, buffer)
    mine = flat[own.start : own.start + own.size].to(machine.memory.setting.device).contiguous()
    segments = [torch.empty_like(mine) for _ in member.ranks]
    distributed.all_gather(segments, mine, group=member.process_group)
    here = _place(machine, buffer, machine.coordinates)
    for rank, segment in zip(member.ranks, segments, strict=True):
        alike = _place(machine, buffer, schedule.mesh.coordinates(rank)) == here
        if alike and schedule.program_of(rank).role == program.role:
            yield own_part(machine, buffer, rank).fragments, segment


def _place(machine: RankMachine, buffer: Buffer, coordinates: Coordinates) -> tuple[int, ...]:
    """Return the indexes of a rank that decide its part of the parameters in `buffer`.

    Experts differ among expert ranks and ranks with parts of the same experts, and all other
    parameters along the tensor axis.
    """
    schedule = machine.schedule
    experts = {each.name for each in schedule.contract.parameters if each.expert}
    pieces = schedule.layout_by_name[buffer.layout or ""].pieces
    if not any(piece.parameter in experts for piece in pieces):
        return (coordinates.get(TENSOR, 0),)
    return tuple(
        group.index(schedule.mesh, coordinates)
        for group in schedule.groups
        if group.name in {EXPERT, EXPERT_TENSOR}
    )


def _joined(machine: RankMachine, buffer: Buffer, parts: _Parts) -> dict[str, torch.Tensor]:
    """Return the parameters of `buffer`, joined from parts of ranks.

    Elements in no part are zero.
    """
    dtype, device = TORCH_DTYPE[buffer.dtype], machine.memory.setting.device
    layout = machine.schedule.layout_by_name[buffer.layout or ""]
    found = {
        piece.parameter: torch.zeros(piece.size, dtype=dtype, device=device)
        for piece in layout.pieces
    }
    for fragments, part in parts:
        for parameter, offset, position, size in fragments:
            found[parameter][offset : offset + size] = part[position : position + size]
    return found


def spread(machine: RankMachine, memory: StateMemory) -> None:
    """Copy the valid values of all ranks to every persistent buffer; every rank calls it."""
    for buffer in persistent(machine, Kind.PARAMETER, Kind.MASTER, Kind.MOMENT):
        if buffer.shard is None and cut_axis(machine, buffer) is not None:
            _put(
                machine, buffer, full_parameters(machine, buffer, memory.flat(buffer.name)), memory
            )
    masters = {buffer.name: buffer for buffer in persistent(machine, Kind.MASTER)}
    for buffer in holders(machine):
        if buffer.name in masters:
            found = full_parameters(machine, buffer, memory.flat(buffer.name))
            for other in persistent(machine, Kind.PARAMETER):
                _put(machine, other, found, memory)
    memory.flush()


def _put(
    machine: RankMachine, buffer: Buffer, values: dict[str, torch.Tensor], memory: StateMemory
) -> None:
    """Write this rank's fragments of the parameters in `values` to `buffer`."""
    for parameter, offset, position, size in held(machine.schedule, buffer, machine.coordinates):
        if parameter in values:
            target = memory.flat(buffer.name)[position : position + size]
            target.copy_(values[parameter][offset : offset + size])
