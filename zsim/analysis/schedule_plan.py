"""Plan of a schedule: its memory and traffic, computed from its buffers and operations."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import TypeVar

from msgspec.structs import replace

from zsim.memory import Peak, memory_ledger, peak
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
        units: names of the units that the stage runs, in order.
        parameters: elements of all parameters of the stage, summed over the tensor axis.
        model_state_bytes, peak, wire_bytes, operations: as in `Plan`.
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
        role: the role that the plan describes: the one with the highest peak memory.
        ranks: world size.
        mesh: axes and their sizes.
        parameters: elements of the whole model.
        trained_parameters: elements of the parameters that are not frozen.
        active_parameters: elements of the parameters that a token runs through.
        model_state_bytes: parameters, gradients and optimizer state on one device.
        peak: peak allocated memory of the first device pool, with the buffers alive then.
        wire_bytes: bytes that a rank sends in a step.
        host_peak: peak host memory of one rank; None if the schedule uses no host memory.
        host_bytes: bytes that a rank copies to host memory and back in a step.
        file_peak: peak bytes of a rank's files on NVMe; None if it has no files.
        file_bytes: bytes that a rank reads from files and writes to them in a step.
        operations: number of operations in one step.
        stages: plans of all pipeline stages; empty without a pipeline.
    """

    role: str
    ranks: int
    mesh: tuple[tuple[str, int], ...]
    parameters: int
    trained_parameters: int
    active_parameters: int
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
    peaks = {program.role: peak(memory_ledger(program, 1), pool) for program in schedule.programs}
    program = max(schedule.programs, key=lambda program: peaks[program.role].bytes)
    return Plan(
        role=program.role,
        ranks=schedule.mesh.size,
        mesh=tuple((axis.name, axis.size) for axis in schedule.mesh.axes),
        parameters=model.parameter_count,
        trained_parameters=model.trained_count,
        active_parameters=model.active_count,
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


def lengthened(plan: Plan, shorter: Plan, turns: int) -> Plan | None:
    """Return the plan of a step with `turns` more turns of micro-batches than `plan`.

    `shorter` is the plan of a turn less. Return None if its peaks of memory differ.
    """
    stages = list(zip(plan.stages, shorter.stages, strict=True))
    peaks, others = (
        [each.peak.bytes, each.host_peak, each.file_peak, *(one.peak.bytes for one in each.stages)]
        for each in (plan, shorter)
    )
    if peaks != others:
        return None
    return changed(
        _longer(plan, shorter, turns),
        stages=tuple([_longer(each, less, turns) for each, less in stages]),
        host_bytes=_more(plan.host_bytes, shorter.host_bytes, turns, ("to_host", "from_host")),
        file_bytes=_more(plan.file_bytes, shorter.file_bytes, turns, ("read", "written")),
    )


_Counted = TypeVar("_Counted", WireBytes, HostBytes, FileBytes, Plan, StagePlan)


def _more(one: _Counted, less: _Counted, turns: int, fields: tuple[str, ...]) -> _Counted:
    """Return `one` with numbers that grow as much in each of `turns` as since `less`."""
    pairs = {name: (getattr(one, name), getattr(less, name)) for name in fields}
    return changed(one, **{name: n + turns * (n - m) for name, (n, m) in pairs.items()})


_Role = TypeVar("_Role", Plan, StagePlan)


def _longer(plan: _Role, shorter: _Role, turns: int) -> _Role:
    """Return `plan` with the volume and the operations of `turns` more turns."""
    volumes = zip(plan.wire_bytes, shorter.wire_bytes, strict=True)  # of the same collectives
    wire_bytes = tuple(_more(each, less, turns, ("bytes",)) for each, less in volumes)
    return changed(_more(plan, shorter, turns, ("operations",)), wire_bytes=wire_bytes)


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
    """Return one rank's peak over all pools at `place`, or None if there are no such pools."""
    pools = {pool.name for pool in schedule.pools if pool.place is place}
    if not pools:
        return None
    entries = (
        replace(each, pool=place) for each in memory_ledger(program, 1) if each.pool in pools
    )
    return peak(tuple(entries), place)


def model_state_bytes(schedule: Schedule, program: Program) -> int:
    """Return the bytes of parameters, gradients and optimizer state on one device."""
    return sum(buffer.size_bytes for buffer in model_states(schedule, program))


def model_states(schedule: Schedule, program: Program) -> Iterator[Buffer]:
    """Yield the buffers of ZeRO's model states on the device.

    These are the persistent buffers of parameters and optimizer state, and all gradients that have
    not been freed from the device before the first update.
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

    A branch counts as its side with the update (`otherwise`).
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
