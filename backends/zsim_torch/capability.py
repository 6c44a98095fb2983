"""Check whether the torch backend can execute a schedule.

An unsupported schedule is refused with a one-line reason before anything starts.
"""

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import nn

from zsim.memory import memory_ledger, peak_bytes
from zsim.proof import places
from zsim.proof.context import Context
from zsim.schedule.operation import (
    OF_SEGMENTS,
    Compute,
    Copy,
    Operation,
    PointToPoint,
    Read,
    ReducingOperation,
    Role,
    Together,
    Write,
    walk,
)
from zsim.schedule.schedule import Place, Program, Schedule
from zsim.units import format_bytes
from zsim_torch.execute.host_memory import file_bytes_needed
from zsim_torch.execute.host_workers import worker_streams
from zsim_torch.execute.range_file import space_refusal
from zsim_torch.module.unit import SegmentKey, TorchUnit, UnitRunError
from zsim_torch.module.visit import LaterUses, parameter_order


def of_schedule(schedule: Schedule) -> str | None:
    """Return why the torch backend cannot execute `schedule`, or None."""
    for program in schedule.programs:
        operations = [*walk(program.setup), *walk(program.step)]
        saved = _saved_by_segments(operations)
        for operation in operations:
            reason = _of_operation(operation) or _of_saved(operation, saved)
            if reason is not None:
                return reason
    if all(pool.place is Place.DEVICE for pool in schedule.pools) and not schedule.host_threads:
        return None
    for finding in places.examine(Context.of(schedule, None)):
        return f"{finding.operation}: {finding.why}"
    return None


def of_device_reads(schedule: Schedule) -> str | None:
    """Return why GPUs cannot execute `schedule`, or None: files are read to host memory only."""
    device = {pool.name for pool in schedule.pools if pool.place is Place.DEVICE}
    for program in schedule.programs:
        for operation in chain(walk(program.setup), walk(program.step)):
            if isinstance(operation, Read | Write):
                for view in (operation.source, operation.target):
                    if program.by_name[view.buffer].pool in device:
                        return (
                            f"{operation.id}: {view.buffer} is in device memory; the torch "
                            "backend has no GPUDirect Storage, files go through host memory"
                        )
    return None


def of_memory(
    schedule: Schedule,
    programs: Iterable[Program],
    *,
    local_ranks: int = 1,
    witness: bool = False,
    offload_path: Path | None = None,
    device_budget: int | None = None,
) -> str | None:
    """Return why `local_ranks` ranks cannot have the memory that `programs` need, or None.

    Reasons are the device budget, missing space for files in one folder, and a witness for
    operations that run on threads.
    """
    reason = _of_budget(schedule, device_budget)
    if reason is None and witness:
        reason = _of_witness(schedule)
    needed = max(sum(file_bytes_needed(schedule, each).values()) for each in programs)
    if reason is None and needed:
        reason = space_refusal(offload_path or Path(gettempdir()), local_ranks * needed)
    return reason


def _of_budget(schedule: Schedule, budget: int | None) -> str | None:
    """Return why `schedule` does not fit on devices of `budget` bytes, or None."""
    needed = ledger_peak_bytes(schedule, Place.DEVICE)
    if budget is None or needed <= budget:
        return None
    return (
        f"device_budget: {format_bytes(budget)} must be at least {format_bytes(needed)}, the "
        "largest book of the device's pools"
    )


def _of_witness(schedule: Schedule) -> str | None:
    """Return why no witness can see all operations of `schedule`, or None."""
    for program in schedule.programs:
        streams = worker_streams(schedule, program)
        if streams:
            return (
                f"witness: must be off, operations on {streams[0]} run on a thread that is not "
                "watched"
            )
    return None


def ledger_peak_bytes(schedule: Schedule, only: Place | None = None) -> int:
    """Return the largest sum of peak bytes of a role's pools, by default in all places."""
    pools = [pool.name for pool in schedule.pools if only in (None, pool.place)]
    return max(
        sum(peak_bytes(memory_ledger(program, 1), pool) for pool in pools)
        for program in schedule.programs
    )


def _of_operation(operation: Operation) -> str | None:
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


def _saved_by_segments(operations: Iterable[Operation]) -> set[str]:
    """Return the buffers of tensors that segments save for backward, which autograd keeps."""
    computes = [each for each in operations if isinstance(each, Compute)]
    every = {id(each.operands): each.operands for each in computes}  # micro-batches share operands
    return {
        operand.view.buffer
        for operands in every.values()
        for operand in operands
        if operand.role in (Role.SAVED, Role.INTERMEDIATE_GRADIENT)
    }


def _of_saved(operation: Operation, saved: Container[str]) -> str | None:
    """Return why `operation` cannot move a saved tensor, or None."""
    if isinstance(operation, Copy) and operation.source.buffer in saved:
        return f"{operation.id}: copies what a segment saves for backward, which is simulated only"
    return None


def _as_one(together: Together) -> str | None:
    """Return why `together` cannot be issued as one call, or None.

    NCCL and Gloo coalesce collectives of one kind and reduction, or sends and receives.
    """
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


def of_units(schedule: Schedule, program: Program, units: Sequence[TorchUnit]) -> str | None:
    """Return why `program` cannot run on the modules `units`, or None."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "autocast: it keeps cast copies of parameters; choose a precision in the strategy"
    by_key = {unit.key: unit for unit in units}
    frozen = {each.name for each in schedule.contract.parameters if each.frozen}
    here = {name for unit in units for name in unit.frozen}
    named = {name for unit in units for name in unit.names}
    for name in sorted(here ^ (frozen & named)):
        trains = "trains" if name in here else "does not train"
        return f"parameter {name}: requires_grad is {name not in here}; the schedule {trains} it"
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
        if operation.action not in OF_SEGMENTS:
            continue
        if operation.draw is not None:
            return f"{operation.id}: draws from {operation.draw.generator}, which is simulated only"
        key = (operation.unit, operation.segment)
        if key not in by_key:
            return f"{operation.id}: {_unknown(key, units)}"
        try:
            parameter_order(schedule, program, operation, by_key[key])
        except UnitRunError as error:
            return str(error)
    return None


def _unknown(key: SegmentKey, units: Sequence[TorchUnit]) -> str:
    """Describe the unit, or segment of a unit, that does not exist."""
    unit, segment = key
    names = list(dict.fromkeys(each.name for each in units))
    if unit in names:
        return f"no segment {segment} of unit {unit}, which no module runs apart"
    return f"no unit {unit!r}; units are {', '.join(names)}"


def _changes_buffers(module: nn.Module) -> bool:
    return any(
        part.training and getattr(part, "track_running_stats", False) for part in module.modules()
    )
