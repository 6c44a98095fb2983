"""Enforced limits: memory by the kernel, time by a timer."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, TypedDict, Unpack

from zsim.limits import Limits, TimeLimitError, limits, using
from zsim.workers.memory_bound import NO_LIMIT, bounded_memory

AGAIN_S: Final = 0.1
"""Seconds after which the time limit is raised again: an exception is lost in a finalizer and in a
callback of the garbage collector."""


class LimitChanges(TypedDict, total=False):
    """Limits by name, as in `zsim.limits.Limits`."""

    operations: int
    ranks: int
    runs: int
    file_bytes: int
    config_bytes: int
    config_values: int
    config_depth: int
    memory_bytes: int | None
    time_s: float | None
    run_memory_bytes: int | None
    run_time_s: float


@contextmanager
def limited(**changes: Unpack[LimitChanges]) -> Generator[Limits]:
    """Limit the block: `with zsim.limited(operations=10**7, memory_bytes=2 * 10**9):`.

    Input that is too large is refused at the start, with a `MistakeError`. Memory beyond
    `memory_bytes`, over all threads of this process, raises `MemoryError`. A call that takes longer
    than `time_s` raises `TimeLimitError`, in the main thread only.

    Args:
        changes: limits by name (see `zsim.limits.Limits`), on top of the current ones.

    Raises:
        ValueError: a limit is not more than 0.
    """
    chosen = replace(limits(), **changes)
    with using(chosen), _time(chosen.time_s), bounded_memory(chosen.memory_bytes):
        yield chosen


@contextmanager
def _time(most_s: float | None) -> Generator[None]:
    if most_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_signal: int, _frame: FrameType | None) -> None:
        if not _is_ending():
            raise TimeLimitError(f"time: it took longer than {most_s:g} s")

    outer_s = signal.getitimer(signal.ITIMER_REAL)[0]
    if 0 < outer_s <= most_s:  # the outer limit ends sooner
        yield
        return
    before, left_s = signal.signal(signal.SIGALRM, late), 0.0
    signal.setitimer(signal.ITIMER_REAL, most_s, AGAIN_S)
    try:
        try:
            yield
        finally:
            left_s = signal.setitimer(signal.ITIMER_REAL, 0)[0]
    finally:  # also if the limit is raised in the line before
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer_s:
            rest_s = outer_s - (most_s - left_s)
            signal.setitimer(signal.ITIMER_REAL, max(rest_s, 1e-3), AGAIN_S)


def _is_ending() -> bool:
    """Return True if a TimeLimitError is already being handled, so that cleanup can finish."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, TimeLimitError):
        error = error.__context__
    return error is not None


def free_memory_bytes() -> int:
    """Return the memory that this process can still allocate, in bytes."""
    bounds: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                bounds.append(int(line.split()[1]) * 1024)
    with suppress(OSError, ValueError):  # of a container, version 2 of control groups
        most = Path("/sys/fs/cgroup/memory.max").read_text("utf-8").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text("utf-8"))
        bounds.append(max(int(most) - used, 0))
    for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(which)
        if soft != NO_LIMIT:
            bounds.append(soft)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(min(bounds, default=physical), 1)
