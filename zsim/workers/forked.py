"""A result that a forked process computes while this process continues.

The fork has a copy of all memory of this process, so only its result is sent. It is a copy of one
thread: a lock that another thread held stays locked. So there is no fork if threads run that zsim
did not start, nor without a second core and memory for both processes. The result is the same in
any case: this process computes it if the fork fails.
"""

import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar, cast

from zsim.limits import limits
from zsim.workers.limited_run import free_memory_bytes
from zsim.workers.memory_bound import WATCH_NAME, bounded_memory, used_bytes

Answer = TypeVar("Answer")

COPIES = 4
"""The allowed memory must be at least this many times the used memory for a fork: pages that
either process writes are duplicated, and each allocates about as much again."""

STOPS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGALRM})
"""Signals that raise or end this process, and end a fork."""

PARENT_DIES = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class ForkedAnswer(Generic[Answer]):
    """The result of a function, which a fork computes in parallel if possible.

    At the end of the `with` block the fork is ended.
    """

    def __init__(self, work: Callable[[], Answer]) -> None:
        self._work = work
        self._process = 0
        self._pipe: FileIO | None = None

    def __enter__(self) -> Self:
        """Start the fork, if it is allowed."""
        if may_fork():
            try:
                self._start()
            except OSError:  # no process or no memory for it: this process does the work
                pass
            except BaseException:  # a delayed signal: without a block, __exit__ does not run
                self._stop()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the fork, whatever its state."""
        self._stop()

    def result(self) -> Answer:
        """Return the result; raise the exceptions of the function."""
        if self._pipe is not None:
            found = self._pipe.readall()
            if self._end() == 0 and found:
                return cast("Answer", pickle.loads(found))
        return self._work()

    def _start(self) -> None:
        read, write = os.pipe()
        parent = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # threads are looked at
                process = os.fork()
            if not process:
                _work_out(self._work, write, parent)
            self._process, self._pipe = process, FileIO(read)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _stop(self) -> None:
        if self._process:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._end()

    def _end(self) -> int:
        """Wait until the fork has ended; return its status."""
        status = -1
        with suppress(ChildProcessError):  # other code waits for all children
            status = os.waitpid(self._process, 0)[1]
        self._process = 0
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        return status


def may_fork() -> bool:
    """Return True if a fork is safe here, and has resources to run in parallel."""
    if not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2:
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    if not all(map(_is_own, threading.enumerate())):
        return False
    return used_bytes() * COPIES <= (limits().memory_bytes or free_memory_bytes())


def _is_own(thread: threading.Thread) -> bool:
    """Return True if a thread holds no lock that a fork may need.

    The threads that watch memory and draw the progress bar have separate locks.
    """
    is_drawing = type(thread).__module__.startswith("rich.")
    return thread is threading.main_thread() or thread.name == WATCH_NAME or is_drawing


def _work_out(work: Callable[[], object], pipe: int, parent: int) -> NoReturn:
    """Write the result to `pipe` and end this process; write nothing on any error."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
        if os.getppid() == parent:
            _write_answer(work, pipe)
            status = 0
    except BaseException:  # the parent computes it again, and reports the error
        pass
    finally:
        os._exit(status)


def _write_answer(work: Callable[[], object], pipe: int) -> None:
    for stop in STOPS:
        if signal.getsignal(stop) is not signal.SIG_IGN:
            signal.signal(stop, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdout = sys.stderr = None  # their buffers belong to the parent
    gc.disable()
    most = limits().memory_bytes
    with bounded_memory(None if most is None else most // 2):
        found = memoryview(pickle.dumps(work()))
    while found:
        found = found[os.write(pipe, found) :]
