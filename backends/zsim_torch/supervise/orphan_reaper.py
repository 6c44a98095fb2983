"""A process that ends orphaned ranks when the program that started them dies.

A rank that is stopped cannot end itself, and nobody else knows the folder of the run. The reaper is
told the process of every rank. When its pipe closes without a farewell, the program was killed: the
reaper ends the ranks with all that they have started, removes the folder, and ends.
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
"""How long the reaper may take to leave."""


def end_group(pid: int) -> None:
    """End the process group of the rank in process `pid`."""
    with suppress(OSError):  # there is no such group: it has ended, or not yet begun
        os.killpg(pid, signal.SIGKILL)


def keep_watch(folder: Path, sockets: Path, connection: Connection) -> None:
    """Run the reaper until it is dismissed, or until it has ended what was left.

    `sockets` is the program's own folder of multiprocessing, which removes it when it ends well.
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
        with suppress(OSError):  # something else of the program's is there
            sockets.rmdir()


def _end_ranks(ranks: Sequence[int]) -> None:
    server = os.getppid()
    for pid in ranks:
        if _parent_of(pid) == server:  # and not another process that has its number now
            end_group(pid)
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return None


class OrphanReaper:
    """The reaper of one run, as the program sees it."""

    def __init__(self, context: ForkServerContext, folder: Path) -> None:
        self._connection, theirs = context.Pipe()
        with theirs:
            self._process: ForkServerProcess = context.Process(
                target=keep_watch, args=(folder, Path(get_temp_dir()), theirs), name="reaper"
            )
            self._process.start()

    @property
    def pid(self) -> int:
        """Return the reaper's own process."""
        assert self._process.pid is not None  # it was started
        return self._process.pid

    def mind(self, pid: int) -> None:
        """End the rank in process `pid` when this program ends."""
        with suppress(OSError):
            self._connection.send_bytes(str(pid).encode())

    def dismiss(self) -> None:
        """End the reaper: the run has ended, and nothing of it is left."""
        with suppress(OSError):
            self._connection.send_bytes(_FAREWELL)
        self._connection.close()
        self._process.join(_FAREWELL_S)
        if self._process.is_alive():  # it is stopped: the run has ended all the same
            self._process.kill()
            self._process.join()
        self._process.close()
