"""Join the process group of a rank: through a file on one machine, or as `torchrun` says.

With CUDA and a device for each local rank, the backend is NCCL with one device per rank. Otherwise
it is Gloo on CPU, also when there are more ranks than devices (NCCL before 2.30 refuses two ranks
on one device, and later only allows it as an experiment). "cuda" with too few devices raises an
error.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from importlib import import_module
from pathlib import Path

import torch
from torch import distributed

from zsim_torch.supervise.core_binding import bind

LOADED_LATE = "torch.fx.experimental.symbolic_shapes"
"""Imported by the first call of `torch.autograd.grad`; preloaded to keep 0.5 s out of a step."""

TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for each process (torch.distributed.run)."""

RECORDED = "zsim"
"""The device that replaces CUDA in a recording (`zsim record`)."""

OF_DEVICE = {"cuda": "nccl", RECORDED: "fake"}
"""The process group backend for each kind of device that has streams."""


class DeviceError(ValueError):
    """A device that this machine does not have; the message is one line."""


class DeviceChoice(StrEnum):
    """The devices of ranks. AUTO: CUDA if every local rank has its own device, else CPU."""

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
    """Return this process's placement if `torchrun` started it, or None.

    Raises:
        DeviceError: the variables are set but are not integers.
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
    """Return the device of the rank at `placement`.

    Raises:
        DeviceError: CUDA is requested, and this machine has fewer devices than local ranks.
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


def backends() -> dict[str, str]:
    """Return the backend of the default process group for each kind of device.

    The group's name does not contain it: a group created without a backend has several.
    """
    return dict(pair.split(":", 1) for pair in distributed.get_backend_config().split(","))


def rank_device(
    asked: torch.device | None,
    held: Iterable[torch.device],
    available: Mapping[str, str] | None,
    *,
    current: torch.device | None,
) -> torch.device:
    """Return the device of a rank: `asked`, or its module's, or the process group's.

    `held` are the devices of its module's parameters, `available` the backends of its process group
    by kind of device, or None without a group. `current` is its CUDA device, if it has one.

    Raises:
        DeviceError: parameters are on several GPUs, or the process group does not support the
            device.
    """
    gpus = sorted({device for device in held if device.type not in ("cpu", "meta")}, key=str)
    if asked is not None:
        device = asked
    elif len(gpus) > 1:
        raise DeviceError(
            f"device: parameters are on {' and '.join(map(str, gpus))}, a rank has one device"
        )
    elif gpus:
        (device,) = gpus
    else:
        device = torch.device("cpu")
        if current is not None and (available or {}).get(current.type) == OF_DEVICE[current.type]:
            device = current
    if device.type not in ("cpu", *OF_DEVICE):
        raise DeviceError(f"device: {device.type} must be cpu or cuda")
    if device.type == RECORDED and current is None:
        raise DeviceError(
            f"device: {RECORDED} is recorded with the streams of cuda; say zsim record --cuda, or "
            "recording(cuda=True)"
        )
    backend = None if available is None else available.get(device.type)
    if available is not None and backend is None:
        raise DeviceError(
            f"device: the process group has no backend for {device.type}; "
            f"call init_process_group({'nccl' if device.type == 'cuda' else 'gloo'!r})"
        )
    if device.type == "cuda" and backend not in (None, "nccl"):
        raise DeviceError(
            f"device: cuda needs NCCL, the process group has {backend} for it; "
            "call init_process_group('nccl'), or train on the CPU"
        )
    return device


def join(
    placement: Placement, choice: DeviceChoice, *, timeout_s: float, store: Path | None = None
) -> torch.device:
    """Join the default process group and return this process's device.

    Without `store` the group connects as torchrun's variables say. A collective that waits longer
    than `timeout_s` fails. Each rank computes in one thread, since ranks share the cores; with
    `store`, a CPU rank is bound to its own share of the cores.

    Raises:
        DeviceError: see `device_of`.
    """
    device = device_of(choice, placement)
    torch.set_num_threads(1)
    import_module(LOADED_LATE)
    if store is not None:
        # Local ranks use loopback, so that no host name has to resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if device.type == "cpu":
            bind(placement.local_rank, placement.local_ranks)
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
