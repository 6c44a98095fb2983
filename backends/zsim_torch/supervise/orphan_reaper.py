"""A process that kills orphaned ranks when the program that started them dies.

A stopped rank cannot end itself, and no other process has the path of the run's folder. The reaper
receives the process id of every rank. If its pipe closes without a farewell, the program was
killed: the reaper then kills the ranks and all their children, removes the folder, and exits.
"""

import os
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Final

_FAREWELL: Final = b""
_FAREWELL_S: Final = 2.0
"""Seconds to wait for the reaper to exit."""


def end_group(pid: int) -> None:
    """Kill the process group of the rank with process id `pid`."""
    with suppress(OSError):  # the group has ended, or does not exist yet
        os.killpg(pid, signal.SIGKILL)


def keep_watch(folder: Path, sockets: Path, connection: Connection) -> None:
    """Run the reaper until it is dismissed, or until it has cleaned up after the program.

    `sockets` is the program's multiprocessing folder, which the program itself removes on a normal
    exit.
    """
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ranks: list[int] = []
    try:
        while (word := connection.recv_bytes()) != _FAREWELL:
            ranks.append(int(word))
    except (EOFError, OSError):
        _end_ranks(ranks)
        shutil.rmtree(folder, ignore_errors=True)
        for socket in sockets.glob("listener-*"):
            socket.unlink(missing_ok=True)
        with suppress(OSError):  # it holds other files of the program
            sockets.rmdir()


def _end_ranks(ranks: Sequence[int]) -> None:
    server = os.getppid()
    for pid in ranks:
        if _parent_of(pid) == server:  # not another process that reuses the id
            end_group(pid)
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return None


class OrphanReaper:
    """The program's handle to the reaper of one run."""

    def __init__(self, context: ForkServerContext, folder: Path) -> None:
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process: ForkServerProcess = context.Process(
                target=keep_watch, args=(folder, Path(get_temp_dir()), theirs), name="reaper"
            )
            self._process.start()

    @property
    def pid(self) -> int:
        """Return the reaper's process id."""
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def mind(self, pid: int) -> None:
        """Register the rank with process id `pid`, to be killed if this program dies."""
        with suppress(OSError):
            self._connection.send_bytes(str(pid).encode())

    def dismiss(self) -> None:
        """End the reaper after a normal end of the run."""
        with suppress(OSError):
            self._connection.send_bytes(_FAREWELL)
        self._connection.close()
        self._process.join(_FAREWELL_S)
        if self._process.is_alive():  # it is stopped by a signal
            self._process.kill()
            self._process.join()
        self._process.close()
