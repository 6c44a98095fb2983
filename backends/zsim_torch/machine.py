"""What this machine can hold: memory for local ranks, on CPU or on CUDA devices."""

import os
import re
from pathlib import Path

import torch

from zsim_torch.process_group import DeviceChoice, Placement, device_of

RANK_BYTES = 50 * 10**6
"""What one rank takes on the CPU beside its buffers: measured, 40 MB of proportional set size."""


def memory_bytes(choice: DeviceChoice, local_ranks: int) -> int:
    """Memory that `local_ranks` ranks can share: of this machine, or of all devices they use.

    Raises:
        DeviceError: CUDA is asked for, and there are too few devices.
    """
    placement = Placement(rank=0, ranks=local_ranks, local_rank=0, local_ranks=local_ranks)
    device = device_of(choice, placement)
    if device.type == "cuda":
        return (
            min(
                torch.cuda.get_device_properties(index).total_memory for index in range(local_ranks)
            )
            * local_ranks
        )
    return max(0, available_bytes() - local_ranks * RANK_BYTES)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that new processes can have without swapping, where Linux says it; else all of it."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text("utf-8"), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found.group(1)) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
