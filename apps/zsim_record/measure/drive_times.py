"""Measure reads and writes of a drive past the page cache, in large concurrent blocks."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import torch

from zsim_torch.execute.range_file import RangeFile, space_refusal

FILE_BYTES: Final = 1 << 28
SMALL_BYTES: Final = 1 << 12
ROUNDS: Final = 5
SMALL_ROUNDS: Final = 32


class DriveError(ValueError):
    """A folder that cannot be measured; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveTimes:
    """Bytes per second of large reads and writes, and seconds of a small read; medians.

    `direct` is True if they bypassed the page cache; otherwise they do not measure the drive.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    free_bytes: int
    direct: bool


def drive_times(folder: Path) -> DriveTimes:
    """Return the times of the drive that holds `folder`; the test file is deleted.

    Raises:
        DriveError: there is not enough space, or no file can be created.
    """
    if not folder.is_dir():
        raise DriveError(f"drive: {folder} must be a folder")
    found = os.statvfs(folder)
    free_bytes = found.f_bavail * found.f_frsize
    reason = space_refusal(folder, FILE_BYTES)
    if reason is not None:
        raise DriveError(f"drive: {reason.removeprefix('offload_path: ')}")
    try:
        file = RangeFile(folder, FILE_BYTES)
    except OSError as error:
        raise DriveError(f"drive: {error}") from error
    try:
        data = torch.zeros(FILE_BYTES, dtype=torch.uint8)
        small = torch.zeros(SMALL_BYTES, dtype=torch.uint8)
        writes, reads, latencies = list[float](), list[float](), list[float]()
        for _ in range(ROUNDS):
            writes.append(_timed(partial(file.write, 0, data)))
            reads.append(_timed(partial(file.read, 0, data)))
        for place in range(SMALL_ROUNDS):
            offset = place * (FILE_BYTES // SMALL_ROUNDS)
            latencies.append(_timed(partial(file.read, offset, small)))
    finally:
        file.close()
    return DriveTimes(
        read_bytes_per_s=FILE_BYTES / median(reads),
        write_bytes_per_s=FILE_BYTES / median(writes),
        latency_s=median(latencies),
        free_bytes=free_bytes,
        direct=file.direct,
    )


def _timed(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
