"""What this backend cannot execute, said in one line before anything starts."""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from zsim.operation import (
    Action,
    AllReduce,
    Compute,
    Operation,
    ReduceScatter,
    Together,
    walk,
)
from zsim.schedule import Program, Schedule
from zsim_torch.autograd import UnitRunError
from zsim_torch.unit import TorchUnit
from zsim_torch.visit import Forecast, parameter_order


def of_schedule(schedule: Schedule) -> str | None:
    """Why no torch backend can execute `schedule`, or None."""
    for axis in schedule.mesh.axes:
        if axis.name == "tensor" and axis.size > 1:
            return f"tensor: {axis.size} ranks; the torch backend runs tensor degree 1"
    for program in schedule.programs:
        for operation in chain(walk(program.setup), walk(program.step)):
            reason = _of_operation(operation)
            if reason is not None:
                return reason
    return None


def _of_operation(operation: Operation) -> str | None:
    if isinstance(operation, Compute) and operation.segment > 0:
        return f"{operation.id}: the torch backend runs units of one segment"
    members = operation.members if isinstance(operation, Together) else (operation,)
    for member in members:
        if isinstance(member, AllReduce | ReduceScatter) and member.accumulate is not member.wire:
            return (
                f"{member.id}: adds up in {member.accumulate}; the torch backend adds up in the "
                f"wire format, here {member.wire}"
            )
    return None


def of_units(schedule: Schedule, program: Program, units: Sequence[TorchUnit]) -> str | None:
    """Why `program` cannot be run on the modules `units`, or None."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast: it keeps cast copies of parameters; choose a precision in the strategy"
    by_name = {unit.name: unit for unit in units}
    again = {visit.unit for visit in Forecast.of(program).recomputed}
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
