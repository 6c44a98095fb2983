"""Memory that the C library keeps when it is freed, where torch's own on a CPU comes from it.

Gradients of a unit are freed when they are in their bucket. glibc gives the end of its heap back to
the kernel when more than twice its largest freed block is free there, which those of two equal
matrices are: each page of the next gradients is a fault then, 1,000 to 3,000 in a step of 10
million parameters, 7 % of its processor time. It raises both thresholds itself as it goes, up to
limits (mallopt(3), M_MMAP_THRESHOLD); here they are there from the start.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
"""Parameters of mallopt, by their numbers in glibc's malloc.h."""

BLOCK_BYTES: Final = 32 << 20
"""DEFAULT_MMAP_THRESHOLD_MAX on 64 bits; twice that is what may stay free (mallopt(3))."""

_SETTINGS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables of the environment with which a user says so (mallopt(3))."""


def keep_freed(environment: Mapping[str, str] = os.environ) -> bool:
    """Let glibc keep up to 64 MiB that are free, unless the user has set it; return whether.

    It holds for the process. Another C library is left as it is.
    """
    if any(name in environment for name in _SETTINGS):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018  (is there in glibc alone)
        mallopt = library.mallopt
    except (AttributeError, OSError):
        return False
    set_block = mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES)
    return bool(set_block and mallopt(M_TRIM_THRESHOLD, 2 * BLOCK_BYTES))
