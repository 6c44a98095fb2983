"""The most memory that this process has held, without what its parent held before `exec`.

`ru_maxrss` of `getrusage` starts at the peak of the process that forked this one, so a small
process that a large test worker starts looks large. Linux counts `VmHWM` anew after `exec`.
"""

from pathlib import Path


def peak_bytes() -> int:
    """The largest resident size of this process so far, in bytes."""
    status = Path("/proc/self/status").read_text("utf-8").splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
