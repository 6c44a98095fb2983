"""The limit on a process's memory: raised early, since CPython needs memory to raise an error.

With nothing left, CPython 3.11 may abort ("Cannot recover from MemoryErrors while normalizing
exceptions") or unwind the same frame forever. So a thread checks the used memory and raises
`MemoryError` while there is a reserve; the kernel refuses allocations that outrun the thread.
"""

import ctypes
import os
import resource
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

NO_LIMIT: Final = resource.RLIM_INFINITY

LOOK_S: Final = 0.005
FILLED_BYTES_PER_S: Final = 2 * 10**9
"""Minimum interval of the thread's checks, and maximum rate at which memory fills. Far from the
limit, it checks less often.

Python fills some 0.4 GB/s on a processor of 2024."""

BLAS_BYTES: Final = 2**30
"""Limits below which OpenBLAS may lack memory."""

RESERVE_BYTES: Final = 32 * 2**20
"""Memory left when `MemoryError` is raised, at most; an eighth of a small limit."""

STACK_BYTES: Final = 2**19
"""Stack of a simple thread: it counts as used memory, and the default has 8 MiB."""

WATCH_NAME: Final = "memory"
"""Name of the thread that checks the used memory."""

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@contextmanager
def bounded_memory(most_bytes: int | None) -> Generator[None]:
    """Limit the memory of this process, over all its threads; None sets no limit.

    Raises:
        MemoryError: in the calling thread, when memory runs out.
    """
    if most_bytes is None:
        yield
        return
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = min(each for each in (most_bytes, before, hard) if each != NO_LIMIT)
    if most < BLAS_BYTES:
        _load_blas()
    watch = _Watch(most)
    try:
        watch.start()  # raises at once if more is used already
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
        yield
    finally:
        while True:
            try:
                watch.end()
                resource.setrlimit(resource.RLIMIT_DATA, (before, hard))
                break
            except MemoryError:  # raised just as the block ended
                continue


@contextmanager
def unbounded_memory() -> Generator[None]:
    """Lift the limit on memory that this process has set or inherited."""
    before, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, hard))


@contextmanager
def small_stacks() -> Generator[None]:
    """Give threads that are started inside a stack of `STACK_BYTES`."""
    usual = threading.stack_size(STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(usual)


def _load_blas() -> None:
    """Let OpenBLAS allocate its buffers: without memory for them it exits with code 1.

    It allocates them when NumPy is imported and at the first matrix product, some 30 MB per core
    (`blas_memory_alloc` of OpenBLAS 0.3).
    """
    import numpy as np

    square = np.ones((64, 64))
    np.linalg.inv(square @ square + np.eye(64))


class _Watch:
    """Thread that raises `MemoryError` in the thread that starts it, when `most` is almost used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._enough = max(most - min(RESERVE_BYTES, most // 8), self._half_way(used_bytes()))
        self._owner = threading.get_ident()
        self._ended = threading.Event()
        self._raising = threading.Lock()

    def start(self) -> None:
        """Start to check, until the end."""
        with small_stacks():
            threading.Thread(target=self._look, name=WATCH_NAME, daemon=True).start()

    def end(self) -> None:
        """Stop raising; an error that was raised before arrives at once."""
        with self._raising:
            self._ended.set()

    def _look(self) -> None:
        used = used_bytes()
        while not self._ended.wait(max(LOOK_S, (self._enough - used) / FILLED_BYTES_PER_S)):
            used = used_bytes()
            with self._raising:
                if used > self._enough and not self._ended.is_set():
                    self._enough = self._half_way(used)
                    _raise_memory_error(self._owner)

    def _half_way(self, used: int) -> int:
        """Return the next threshold: freed memory may stay allocated, and an error needs some."""
        return (used + self._most) // 2


def _raise_memory_error(thread: int) -> None:
    """Raise `MemoryError` in `thread` at its next instruction.

    It is never cancelled: CPython 3.11 would then check for it at every instruction.
    """
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(MemoryError)
    )


def used_bytes() -> int:
    """Return the bytes that count against RLIMIT_DATA: private writable memory, no main stack."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * PAGE_BYTES
