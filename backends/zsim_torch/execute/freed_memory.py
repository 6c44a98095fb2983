"""Make glibc keep freed memory, which torch's CPU allocator takes from it.

Gradients of a unit are freed once they are copied to their bucket. glibc returns the end of its
heap to the kernel when more than twice its largest freed block is free there, as it is after
freeing two equal matrices. Each page of the next gradients then faults: 1,000 to 3,000 faults in a
step of 10 million parameters, 7 % of the CPU time. glibc raises both thresholds over time, up to
limits (mallopt(3), M_MMAP_THRESHOLD); this module sets the limits from the start.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameter numbers of mallopt, from glibc's malloc.h."""

BLOCK_BYTES: Final = 32 << 20
"""DEFAULT_MMAP_THRESHOLD_MAX on 64 bits; twice that may stay free (mallopt(3))."""

_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables that set the same thresholds (mallopt(3))."""


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Let glibc keep up to 64 MiB of free memory; return True if that was set.

    The setting holds for the process. If the user has set one of the environment variables, or the
    C library is not glibc, nothing changes.
    """
    if any(name in environment for name in _SETTINGS):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (exists in glibc only)
        mallopt = library.mallopt
    except (AttributeError, OSError):
        return False
    set_block = mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES)
    return bool(set_block and mallopt(M_TRIM_THRESHOLD, 2 * BLOCK_BYTES))
