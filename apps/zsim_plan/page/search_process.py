"""Searches of the page: one runs in a child process, and a few wait in a queue.

The process has limits on memory and time. It ends with the request: when the answer is there, when
the client disconnects, or when the server ends.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Lock
from time import monotonic, sleep  # noqa: TID251  (only a clock can end a process that hangs)
from typing import Any, Final

from zsim.limits import limits
from zsim.units import format_bytes
from zsim.workers.limited_run import free_memory_bytes
from zsim.workers.processes import cores

Line = dict[str, Any]
"""A line of the answer, as the process of a search writes it, or `{"waiting": N}`."""

COMMAND: Final = (sys.executable, "-P", "-m", "zsim_plan.page.search_child")

WAITING: Final = 3
"""Maximum number of searches that wait while one runs."""

TIME_S: Final = 900.0
"""Time limit of a search in seconds."""

GRACE_S: Final = 10.0
"""Seconds after the time limit at which the process is ended without its answer."""

MEMORY_SHARE: Final = 2
"""A search may use the free memory divided by this."""

LINE_BYTES: Final = 4_000_000
"""Maximum size of a line of the answer."""

LOOK_S: Final = 0.2
"""Interval in seconds at which a search checks if its client is connected."""

FULL: Final = (
    f"Search: one is running and {WAITING} wait, the maximum; try again when one has ended"
)


class SearchQueue:
    """The running search, then the waiting ones in order of arrival."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._tickets: list[object] = []

    def enter(self) -> object | None:
        """Return a ticket at the end of the queue; None if the queue is full."""
        with self._lock:
            if len(self._tickets) > WAITING:
                return None
            ticket = object()
            self._tickets.append(ticket)
            return ticket

    def ahead(self, ticket: object) -> int:
        """Return the number of searches before that with `ticket`."""
        with self._lock:
            return self._tickets.index(ticket)

    def leave(self, ticket: object) -> None:
        """Remove the search with `ticket`."""
        with self._lock:
            self._tickets.remove(ticket)


def searched(queue: SearchQueue, request: Line, has_left: Callable[[], bool]) -> Generator[Line]:
    """Yield the lines of a search: its place in the queue, its progress, its answer.

    They end early when the client has left.
    """
    ticket = queue.enter()
    if ticket is None:
        yield {"refused": FULL}
        return
    try:
        told = 0
        while ahead := queue.ahead(ticket):
            if has_left():
                return
            if ahead != told:
                yield {"waiting": ahead}
                told = ahead
            sleep(LOOK_S)
        yield from _answered(request, has_left)
    finally:
        queue.leave(ticket)


def _answered(request: Line, has_left: Callable[[], bool]) -> Generator[Line]:
    """Yield the lines of the process that answers `request`."""
    workers = cores()
    most = free_memory_bytes() // MEMORY_SHARE
    most = min(most, limits().memory_bytes or most) // (workers + 1)
    asked = {**request, "memory_bytes": most, "time_s": TIME_S, "workers": workers}
    with _process(asked) as (process, out):
        end_s, rest = monotonic() + TIME_S + GRACE_S, b""
        while not has_left():
            if monotonic() > end_s:
                yield {"refused": f"time: took longer than {TIME_S:g} s; choose fewer GPUs"}
                return
            if select.select([out], [], [], LOOK_S)[0]:
                part = os.read(out, 65_536)
            elif _has_ended(process):  # a worker may still hold the pipe open
                part = b""
            else:
                continue
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                told: Line = json.loads(line)
                yield told
                if "done" not in told:
                    return
            if not part or len(rest) > LINE_BYTES:
                yield {"refused": _died(most)}
                return


def _died(most_bytes: int) -> str:
    return (
        "memory: the search ended without an answer; each of its processes may use "
        f"{format_bytes(most_bytes)}; choose fewer GPUs"
    )


@contextmanager
def _process(request: Line) -> Generator[tuple[int, int]]:
    """Yield the number of a process that answers `request`, and its output; end it afterwards."""
    process = subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError):  # it ended at once
            process.stdin.write(f"{json.dumps(request)}\n".encode())
            process.stdin.flush()
        yield process.pid, process.stdout.fileno()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with its workers, before it is reaped
        process.wait()
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()


def _has_ended(process: int) -> bool:
    """Return True if a child has ended; it stays a zombie, so that its number is not reused."""
    flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process, flags) is not None
