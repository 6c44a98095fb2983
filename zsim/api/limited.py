"""Limits that are enforced: memory by the kernel, time by a timer."""

import os
import resource
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, TypedDict, Unpack, cast

from zsim.backend.backend import RunFailedError
from zsim.limits import Limits, limits, using
from zsim.mistake import MistakeError
from zsim.suggestion import one_of
from zsim.units import PICOSECONDS_PER_SECOND, parse_size, parse_time

NO_LIMIT: Final = resource.RLIM_INFINITY


class LimitChanges(TypedDict, total=False):
    """Limits by name, as in `zsim.limits.Limits`."""

    operations: int
    ranks: int
    runs: int
    file_bytes: int
    config_bytes: int
    memory_bytes: int | None
    time_s: float | None


@contextmanager
def limited(**changes: Unpack[LimitChanges]) -> Generator[Limits]:
    """Bound what runs inside: `with zsim.limited(operations=10**7, memory_bytes=2 * 10**9):`.

    What is too large is refused before it begins, as a `MistakeError`. Memory beyond
    `memory_bytes`, which is for all threads of this process, is a `MemoryError`; a call that takes
    longer than `time_s` is a `RunFailedError`, in the main thread alone.

    Args:
        changes: limits by name (see `zsim.limits.Limits`), on top of those that hold already.

    Raises:
        ValueError: a limit is not more than 0.
    """
    chosen = replace(limits(), **changes)
    with using(chosen), _memory(chosen.memory_bytes), _time(chosen.time_s):
        yield chosen


@contextmanager
def _memory(most_bytes: int | None) -> Generator[None]:
    if most_bytes is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    bounds = [most_bytes, *(each for each in (before, hard) if each != NO_LIMIT)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


@contextmanager
def memory_of_ranks() -> Generator[None]:
    """Lift the bound on memory: real ranks inherit it, and CUDA reserves more than it uses."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


@contextmanager
def _time(most_s: float | None) -> Generator[None]:
    if most_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise RunFailedError(f"time: it took longer than {most_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    outer = signal.setitimer(signal.ITIMER_REAL, most_s)[0]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, outer)
        signal.signal(signal.SIGALRM, before)


def chosen_limits(settings: Sequence[str]) -> LimitChanges:
    """Return limits as the command line has them: `memory=8 GB`, `time=60`, `operations=1e7`.

    Memory that is not said is what the machine has free.

    Raises:
        MistakeError: one is not known, or has no such value.
    """
    given: dict[str, float] = {"memory_bytes": free_memory_bytes()}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if key not in KEYS:
            raise MistakeError(f"--limit: {one_of(key, KEYS)}")
        name, parse = KEYS[key]
        try:
            given[name] = parse(value)
        except ValueError as error:
            raise MistakeError(f"--limit: {key}: {error}") from None
        if not 0 < given[name] < MOST:
            raise MistakeError(f"--limit: {key}: {value!r} must be more than 0 and less than 1e18")
    return cast("LimitChanges", given)


def _count(value: str) -> int:
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} must be a whole number") from None


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return parse_time(value) / PICOSECONDS_PER_SECOND


KEYS: Final[Mapping[str, tuple[str, Callable[[str], float]]]] = {
    "operations": ("operations", _count),
    "ranks": ("ranks", _count),
    "runs": ("runs", _count),
    "file": ("file_bytes", parse_size),
    "config": ("config_bytes", parse_size),
    "memory": ("memory_bytes", parse_size),
    "time": ("time_s", _seconds),
}
"""Limits on the command line: the field, and what reads a value."""

MOST: Final = 1e18


def free_memory_bytes() -> int:
    """Return the memory that this process can still have."""
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
