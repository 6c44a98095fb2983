"""Plan of what a schedule holds and moves, read off its buffers and operations."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zsim.memory import Peak, book, peak
from zsim.model.model import Model
from zsim.network.volume import communications, is_scalar, ring_equivalent_bytes
from zsim.schedule.host_traffic import file_bytes, host_bytes
from zsim.schedule.issue_order import taken
from zsim.schedule.operation import Action, Allocate, Compute, Free, walk
from zsim.schedule.schedule import (
    MODEL_STATE,
    Buffer,
    FileBytes,
    HostBytes,
    Kind,
    Place,
    Program,
    Schedule,
    WireBytes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Memory and traffic of a rank of one stage of a pipeline.

    Attributes:
        role: name of the stage.
        units: those that it runs, in order.
        parameters: elements of all its parameters, over the tensor axis.
        model_state_bytes, peak, wire_bytes, operations: as of `Plan`.
    """

    role: str
    units: tuple[str, ...]
    parameters: int
    model_state_bytes: int
    peak: Peak
    wire_bytes: tuple[WireBytes, ...]
    operations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One role's share of a schedule.

    Attributes:
        role: whose plan it is: the role that holds most.
        roles: how many there are.
        ranks: world size.
        mesh: axes and their sizes.
        parameters: elements of the whole model.
        trained_parameters: those of parameters that are not frozen.
        model_state_bytes: parameters, gradients and optimizer state on one device.
        peak: the largest book of the first device pool, with what was alive.
        wire_bytes: what a rank sends in a step.
        host_peak: the largest book of the host's memory, of one rank; None if none is used.
        host_bytes: what a rank copies to its host's memory and back in a step.
        file_peak: the most that a rank has in files on NVMe; None if it has none.
        file_bytes: what a rank reads from files in a step, and writes.
        operations: operations in one step.
        stages: every stage of a pipeline; none without one.
    """

    role: str
    ranks: int
    mesh: tuple[tuple[str, int], ...]
    parameters: int
    trained_parameters: int
    model_state_bytes: int
    peak: Peak
    wire_bytes: tuple[WireBytes, ...]
    host_peak: Peak | None
    host_bytes: HostBytes
    file_peak: Peak | None
    file_bytes: FileBytes
    operations: int
    stages: tuple[StagePlan, ...] = ()


def plan(schedule: Schedule, model: Model) -> Plan:
    """Return the plan of the role that holds the most memory at its peak."""
    pool = schedule.pools[0].name
    peaks = {program.role: peak(book(program, 1), pool) for program in schedule.programs}
    program = max(schedule.programs, key=lambda program: peaks[program.role].bytes)
    return Plan(
        role=program.role,
        ranks=schedule.mesh.size,
        mesh=tuple((axis.name, axis.size) for axis in schedule.mesh.axes),
        parameters=model.parameter_count,
        trained_parameters=model.trained_count,
        model_state_bytes=model_state_bytes(schedule, program),
        file_peak=_peak_at(schedule, program, Place.NVME),
        file_bytes=file_bytes(program),
        peak=peaks[program.role],
        wire_bytes=wire_bytes(schedule, program),
        host_peak=_peak_at(schedule, program, Place.HOST),
        host_bytes=host_bytes(schedule, program),
        operations=sum(1 for _ in walk(program.step)),
        stages=tuple(_stage(schedule, model, each, peaks[each.role]) for each in schedule.programs)
        if len(schedule.programs) > 1
        else (),
    )


def _stage(schedule: Schedule, model: Model, program: Program, most: Peak) -> StagePlan:
    """Return the plan of the stage whose ranks run `program`."""
    run = {
        operation.unit
        for operation in walk(program.step)
        if isinstance(operation, Compute) and operation.action is Action.FORWARD
    }
    units = tuple(unit for unit in model.units if unit.name in run)
    return StagePlan(
        role=program.role,
        units=tuple(unit.name for unit in units),
        parameters=model.count_of({each for unit in units for each in unit.parameters}),
        model_state_bytes=model_state_bytes(schedule, program),
        peak=most,
        wire_bytes=wire_bytes(schedule, program),
        operations=sum(1 for _ in walk(program.step)),
    )


def _peak_at(schedule: Schedule, program: Program, place: Place) -> Peak | None:
    """Return the largest book of all pools at a place, of one rank; None if there are none."""
    pools = {pool.name for pool in schedule.pools if pool.place is place}
    if not pools:
        return None
    entries = (replace(each, pool=place) for each in book(program, 1) if each.pool in pools)
    return peak(tuple(entries), place)


def model_state_bytes(schedule: Schedule, program: Program) -> int:
    """Return parameters, gradients and optimizer state on one device: ZeRO's model states."""
    return sum(buffer.size_bytes for buffer in model_states(schedule, program))


def model_states(schedule: Schedule, program: Program) -> Iterator[Buffer]:
    """Yield buffers of ZeRO's model states on the device.

    What persists of those kinds, and gradients: they are alive together when the update begins,
    unless they have left the device by then.
    """
    persistent, left = set(program.persistent), set[str]()
    for operation in taken(program.step, overflows=False):
        if isinstance(operation, Compute) and operation.action is Action.UPDATE:
            break
        if isinstance(operation, Allocate):
            left.discard(operation.buffer)
        if isinstance(operation, Free):
            left.add(operation.buffer)
    on_device = {pool.name for pool in schedule.pools if pool.place is Place.DEVICE}
    for buffer in program.buffers:
        if buffer.pool not in on_device:
            continue
        is_gradient = buffer.kind is Kind.GRADIENT and buffer.name not in left
        if is_gradient or (buffer.kind in MODEL_STATE and buffer.name in persistent):
            yield buffer


def wire_bytes(schedule: Schedule, program: Program) -> tuple[WireBytes, ...]:
    """Return ring-equivalent bytes of one step by group and collective, summed over the operations.

    Of a branch, the side that updates (`otherwise`) counts.
    """
    count = {group.name: group.size(schedule.mesh) for group in schedule.groups}
    totals: dict[tuple[str, str, bool], int] = {}
    for operation in taken(program.step, overflows=False):
        for member in communications(operation):
            key = (member.group, member.name, is_scalar(member))
            size = ring_equivalent_bytes(member, count[member.group])
            totals[key] = totals.get(key, 0) + size
    return tuple(
        WireBytes(group=group, collective=collective, bytes=size, scalar=scalar)
        for (group, collective, scalar), size in sorted(totals.items())
        if size
    )
