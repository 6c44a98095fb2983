"""Check a module, a schedule and this rank's environment before anything starts."""

from collections.abc import Sequence

import torch
from torch import distributed, nn

from zsim.backend.backend import RefusedError
from zsim.schedule.schedule import Program, Schedule
from zsim_torch import capability
from zsim_torch.execute import blocking_host
from zsim_torch.execute.run_state import lost_state
from zsim_torch.initial_values import need_buffers
from zsim_torch.module.absent import is_absent
from zsim_torch.module.module_refusal import need_no_moments, need_trainable
from zsim_torch.module.unit import TorchUnit
from zsim_torch.run_option import Option
from zsim_torch.supervise.process_group import DeviceError, backends, rank_device


def need_runnable(
    schedule: Schedule, program: Program, units: Sequence[TorchUnit], *, blocking: bool
) -> None:
    """Raise RefusedError unless this rank can run `program` on `units`.

    `blocking` is True if the host waits for each operation, as with Gloo on a CPU. The message
    gives the reason in one line.
    """
    reason = capability.of_schedule(schedule) or capability.of_units(schedule, program, units)
    if reason is None:
        judge = blocking_host.refusal if blocking else capability.of_device_reads
        reason = judge(schedule)
    if reason is not None:
        raise RefusedError(reason)


def need_start(module: nn.Module, optimizer: object, option: Option) -> None:
    """Raise an error unless `module` can be trained from the start; load its buffers.

    Raises:
        RefusedError: it cannot be trained.
        CheckpointError: the folder with its values cannot be read, or is of another model.
    """
    need_trainable(module)
    need_no_moments(optimizer, may_restart=option.restart)
    need_buffers(module, option.initial)


def need_values_and_memory(
    module: nn.Module, schedule: Schedule, program: Program, option: Option
) -> None:
    """Raise RefusedError unless the memory and the initial values of `program` are available."""
    _need_memory(schedule, program, option)
    _need_module(module, program, option)


def _need_memory(schedule: Schedule, program: Program, option: Option) -> None:
    """Raise RefusedError unless the device and files in `option` have room for `program`."""
    reason = capability.of_memory(
        schedule,
        (program,),
        witness=option.witness,
        offload_path=option.offload_path,
        device_budget=option.device_budget,
    )
    if reason is not None:
        raise RefusedError(reason)


def _need_module(module: nn.Module, program: Program, option: Option) -> None:
    """Raise RefusedError unless `module` has the initial values that `program` needs.

    Its parameters may have no values, or an earlier run may have left state that is lost.
    """
    if option.initial is None:
        if any(parameter.is_meta for parameter in module.parameters()):
            raise RefusedError(
                "module: its parameters have no values, and `initial` is not given: say "
                "Option(initial=...), the path of a checkpoint or an Initializer"
            )
        if any(is_absent(parameter) for parameter in module.parameters()):
            raise RefusedError(
                "module: an earlier run with write_back=False, or one that failed, left it no "
                "parameters, and `initial` is not given"
            )
    lost = () if option.restart else lost_state(module, program, given=option.initial is not None)
    if lost:
        raise RefusedError(
            f"module: an earlier run trained it, and its {' and '.join(lost)} would begin anew; "
            "train once with more steps, or say Option(restart=True)"
        )


def place(schedule: Schedule, module: nn.Module, option: Option) -> tuple[int, torch.device]:
    """Return this rank's number and device.

    Raises:
        RefusedError: the number of ranks is not the schedule's, or the process group cannot use the
            device.
    """
    joined = distributed.is_initialized()
    rank = distributed.get_rank() if joined else 0
    ranks = distributed.get_world_size() if joined else 1
    if ranks != schedule.mesh.size:
        raise RefusedError(f"ranks: the schedule is for {schedule.mesh.size}, here are {ranks}")
    current = (
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    )
    held = {parameter.device for parameter in module.parameters()}
    try:
        return rank, rank_device(
            option.device, held, backends() if joined else None, current=current
        )
    except DeviceError as error:
        raise RefusedError(str(error)) from error
