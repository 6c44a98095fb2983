"""Devices and memory of this machine for local ranks, and bounds for timeouts."""

import os
import re
from itertools import chain
from pathlib import Path

import torch

from zsim.schedule.operation import Compute, walk
from zsim.schedule.schedule import Schedule

RANK_BYTES = 50 * 10**6
"""CPU memory of a rank besides its buffers: 40 MB of proportional set size were measured."""

SLOW_FLOPS_PER_S = 2 * 10**9
SLOW_BYTES_PER_S = 10**9
"""Lower bounds for one core, even in emulated formats; for timeouts, not for predictions."""


def slowest_operation_s(schedule: Schedule, local_ranks: int) -> float:
    """Return an upper bound in seconds for the largest operation on slow cores shared by ranks."""
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
    """Return the memory of `local_ranks` ranks: this machine's, or the sum of their GPUs'."""
    if device.type == "cpu":
        return max(0, available_bytes() - local_ranks * RANK_BYTES)
    devices = (torch.cuda.get_device_properties(index) for index in range(local_ranks))
    return local_ranks * min(one.total_memory for one in devices)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory available without swapping, as Linux reports it; else the total memory."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
