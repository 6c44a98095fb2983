"""Capabilities of this backend.

What it cannot execute is refused in one line before anything starts.
"""

from collections.abc import Sequence, Set
from itertools import chain
from typing import Final

import torch
from torch import nn

from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    Compute,
    Copy,
    Fill,
    Operation,
    PointToPoint,
    ReducingOperation,
    Together,
    walk,
)
from zsim.schedule.schedule import Place, Program, Schedule
from zsim_torch.module.autograd import UnitRunError
from zsim_torch.module.unit import TorchUnit
from zsim_torch.module.visit import LaterUses, parameter_order

SINGLE_AXES: Final = frozenset({"tensor"})
"""Axes along which there is one rank: units are not cut."""


def of_schedule(schedule: Schedule) -> str | None:
    """Why no torch backend can execute `schedule`, or None."""
    for axis in schedule.mesh.axes:
        if axis.name in SINGLE_AXES and axis.size > 1:
            return f"{axis.name}: {axis.size} ranks; the torch backend runs {axis.name} degree 1"
    for parameter in schedule.contract.parameters:
        if parameter.frozen:
            return f"{parameter.name}: frozen; the torch backend trains every parameter"
    on_host = {pool.name for pool in schedule.pools if pool.place is Place.HOST}
    for program in schedule.programs:
        for operation in chain(walk(program.setup), walk(program.step)):
            reason = _of_operation(operation)
            if reason is not None:
                return reason
        there = {buffer.name for buffer in program.buffers if buffer.pool in on_host}
        for operation in walk(program.step):
            reason = _of_host_memory(operation, there)
            if reason is not None:
                return f"{operation.id}: {reason}, which {OUT_OF_ORDER}"
    return None


def _of_operation(operation: Operation) -> str | None:
    if isinstance(operation, Compute) and operation.segment > 0:
        return f"{operation.id}: the torch backend runs units of one segment"
    if isinstance(operation, Together) and (reason := _as_one(operation)) is not None:
        return reason
    members = operation.members if isinstance(operation, Together) else (operation,)
    for member in members:
        if isinstance(member, ReducingOperation) and member.accumulate is not member.wire:
            return (
                f"{member.id}: adds up in {member.accumulate}; the torch backend adds up in the "
                f"wire format, here {member.wire}"
            )
    return None


def _as_one(together: Together) -> str | None:
    """Why `together` is not issued as one: NCCL and Gloo take one kind and reduction, or pairs."""
    kinds = {
        f"{member.name} ({member.reduction})"
        if isinstance(member, ReducingOperation)
        else member.name
        for member in together.members
    }
    if len(kinds) == 1 or all(isinstance(each, PointToPoint) for each in together.members):
        return None
    *others, last = sorted(kinds)
    return (
        f"{together.id}: issues {', '.join(others)} and {last} as one; the torch backend issues "
        "collectives of one kind as one, or sends and receives"
    )


OUT_OF_ORDER: Final = "the torch backend does not execute in order with streams"

_ON_SHARDS = (Action.UPDATE, Action.NORM, Action.FINITE, Action.UNSCALE, Action.CLIP)


def _of_host_memory(operation: Operation, there: Set[str]) -> str | None:
    """Return what `operation` would have the host compute, at once; buffers `there` are its own."""
    match operation:
        case Copy(accumulate=True, source=source, target=target):
            if (source.buffer in there) != (target.buffer in there):
                return "adds up between device and host memory"
            what = "copy that adds up"
        case Compute(action=action) if action in _ON_SHARDS:
            what = str(action)
        case Fill():
            what = "fill"
        case _:
            return None
    touched = [access.view.buffer for access in accesses(operation)]
    name = next((name for name in touched if name in there), None)
    return None if name is None else f"{what} on {name} in host memory"


def of_units(schedule: Schedule, program: Program, units: Sequence[TorchUnit]) -> str | None:
    """Why `program` cannot be run on the modules `units`, or None."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast: it keeps cast copies of parameters; choose a precision in the strategy"
    by_name = {unit.name: unit for unit in units}
    again = {visit.unit for visit in LaterUses.of(program).recomputed}
    for unit in units:
        if unit.name in again and _changes_buffers(unit.module):
            return (
                f"unit {unit.name}: a batch norm changes its buffers in each forward, so it "
                "cannot be run again; turn checkpointing off for it"
            )
    for operation in walk(program.step):
        if not isinstance(operation, Compute):
            continue
        if operation.action not in (Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD):
            continue
        if operation.draw is not None:
            return f"{operation.id}: draws from {operation.draw.generator}, which is simulated only"
        if operation.unit not in by_name:
            return f"{operation.id}: no unit {operation.unit!r}; units are {', '.join(by_name)}"
        try:
            parameter_order(schedule, program, operation, by_name[operation.unit])
        except UnitRunError as error:
            return str(error)
    return None


def _changes_buffers(module: nn.Module) -> bool:
    return any(
        part.training and getattr(part, "track_running_stats", False) for part in module.modules()
    )
