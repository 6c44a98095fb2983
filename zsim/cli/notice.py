"""A line on standard error when a command takes long, also if its output goes to a pipe."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import process_time

LONG_S = 3.0
"""Seconds of work after which a command says so."""

LOOK_S = 0.25
"""Seconds between two looks at the processor time."""

_ended = Event()
"""Set when the command ends, or shows a progress bar."""

_delegates = Event()
"""Set when other processes work for the command: then its own processor time says nothing."""


_watched = Event()
"""Set while this process runs one command; a caller in Python wants no lines on standard error."""


def is_watched() -> bool:
    """Return True if this process runs one command, for a user who waits."""
    return _watched.is_set()


@contextmanager
def noticed(name: str, spent_s: Callable[[], float] = process_time) -> Generator[None]:
    """Print one line on standard error if command `name` works for more than `LONG_S` seconds.

    `spent_s` returns the processor time of this process. It decides instead of the time of day, so
    that a short command on a busy machine prints nothing. Once other processes work for the
    command, `LONG_S` seconds of waiting count too.
    """
    _ended.clear()
    _delegates.clear()
    _watched.set()
    watch = Thread(target=_watch, args=(name, spent_s), daemon=True)
    with suppress(RuntimeError):  # no memory for a thread: the command works without a notice
        watch.start()
    try:
        yield
    finally:
        _ended.set()
        _watched.clear()
        if watch.ident is not None:
            watch.join()


def _watch(name: str, spent_s: Callable[[], float]) -> None:
    waited_s = 0.0
    while not _ended.wait(LOOK_S):
        waited_s += LOOK_S if _delegates.is_set() else 0.0
        if max(waited_s, spent_s()) >= LONG_S and not _ended.is_set():
            with suppress(OSError, ValueError):  # standard error is closed
                print(f"zsim {name}: still working; Ctrl-C ends it", file=sys.stderr, flush=True)
            return


def delegate() -> None:
    """Count time of waiting from now on: other processes work for the command."""
    _delegates.set()


def silence() -> None:
    """Print no notice for the rest of the command: it shows its progress."""
    _ended.set()
