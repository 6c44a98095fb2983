"""Which process group a rank joins, and how: local ranks by a file, `torchrun` by its environment.

With CUDA and a device for each local rank it is NCCL, one device per rank. Otherwise it is Gloo on
CPU, also when there are more ranks than devices (NCCL refuses two ranks on one device before 2.30,
and there only as an experiment). Whoever asks for "cuda" with too few devices is told so.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed

LOADED_LATE = "torch.fx.experimental.symbolic_shapes"
"""What `torch.autograd.grad` imports in its first call: half a second that no step should pay."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets for each process (torch.distributed.run, "Environment Variables")."""


class DeviceError(ValueError):
    """A device that this machine does not have; one line."""


class DeviceChoice(StrEnum):
    """Where ranks compute. AUTO: CUDA where every local rank has a device of its own, else CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One rank among `ranks`, of which `local_ranks` share this machine."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int


def under_torchrun(environment: Mapping[str, str] | None = None) -> Placement | None:
    """This process's placement if `torchrun` started it, or None.

    Raises:
        DeviceError: the variables are there but are no whole numbers.
    """
    variables = os.environ if environment is None else environment
    if any(name not in variables for name in TORCHRUN_VARIABLES):
        return None
    try:
        ranks = int(variables["WORLD_SIZE"])
        return Placement(
            rank=int(variables["RANK"]),
            ranks=ranks,
            local_rank=int(variables["LOCAL_RANK"]),
            local_ranks=int(variables.get("LOCAL_WORLD_SIZE", ranks)),
        )
    except ValueError:
        given = ", ".join(f"{name}={variables[name]!r}" for name in TORCHRUN_VARIABLES[:3])
        raise DeviceError(f"torchrun variables must be whole numbers, got {given}") from None


def device_of(choice: DeviceChoice, placement: Placement) -> torch.device:
    """The device of the rank at `placement`.

    Raises:
        DeviceError: CUDA is asked for, and this machine has fewer devices than local ranks.
    """
    if choice is DeviceChoice.CPU:
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= placement.local_ranks:
        return torch.device("cuda", placement.local_rank)
    if choice is DeviceChoice.CUDA:
        raise DeviceError(
            f"device: cuda needs a device for each of {placement.local_ranks} local ranks, this "
            f"machine has {count}; use fewer ranks or device cpu"
        )
    return torch.device("cpu")


def join(
    placement: Placement, choice: DeviceChoice, *, timeout_s: float, store: Path | None = None
) -> torch.device:
    """This process is a member of the default process group; returns its device.

    Without `store` the group meets as torchrun says. A collective that waits for longer than
    `timeout_s` fails. Each rank computes in one thread, since ranks share the cores.

    Raises:
        DeviceError: see `device_of`.
    """
    device = device_of(choice, placement)
    torch.set_num_threads(1)
    import_module(LOADED_LATE)
    if store is not None:
        # Local ranks talk over loopback: no name of this host has to resolve to anything.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method="env://" if store is None else f"file://{store}",
        rank=placement.rank,
        world_size=placement.ranks,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return device
