"""Devices and memory of this machine for local ranks, and how long they may take."""

import os
import re
from itertools import chain
from pathlib import Path

import torch

from zsim.schedule.operation import Compute, walk
from zsim.schedule.schedule import Schedule

RANK_BYTES = 50 * 10**6
"""What one rank takes on the CPU beside its buffers: measured, 40 MB of proportional set size."""

SLOW_FLOPS_PER_S = 2 * 10**9
SLOW_BYTES_PER_S = 10**9
"""What one core reaches even with formats that it emulates: no prediction, a bound for patience."""


def slowest_operation_s(schedule: Schedule, local_ranks: int) -> float:
    """Seconds after which the largest operation is done even on slow cores that ranks share."""
    slowest = max(
        (
            sum(
                max(kernel.flops / SLOW_FLOPS_PER_S, kernel.bytes / SLOW_BYTES_PER_S)
                for kernel in operation.kernels
            )
            for program in schedule.programs
            for operation in chain(walk(program.setup), walk(program.step))
            if isinstance(operation, Compute)
        ),
        default=0.0,
    )
    return slowest * max(1.0, local_ranks / (os.cpu_count() or 1))


def memory_bytes(device: torch.device, local_ranks: int) -> int:
    """Memory that `local_ranks` ranks can share: of this machine, or of a CUDA device for each."""
    if device.type == "cpu":
        return max(0, available_bytes() - local_ranks * RANK_BYTES)
    devices = (torch.cuda.get_device_properties(index) for index in range(local_ranks))
    return local_ranks * min(one.total_memory for one in devices)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that new processes can have without swapping, where Linux says it; else all of it."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
