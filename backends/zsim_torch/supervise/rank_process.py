"""The life of a rank: join the process group, then run jobs until the parent's pipe closes.

A rank leads its own process group, so its children end with it. It ignores the terminal's
interrupt, since the parent ends it, and it ends when the parent is gone. Its standard error, and
the standard output of every rank but the first, go to a log file.
"""

import faulthandler
import os
import pickle
import runpy
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from torch import distributed

from zsim_torch.supervise.process_group import DeviceChoice, Placement, join
from zsim_torch.supervise.progress_record import ProgressRecord, note, note_to, step_done
from zsim_torch.supervise.rank_failure import Failure, failure_of

STACKS_SIGNAL = signal.SIGUSR1
"""Signal that makes a rank write the stacks of all its threads to its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Settings of a rank at its start; files of the run are in `folder`."""

    rank: int
    ranks: int
    folder: Path
    device: DeviceChoice
    collective_timeout_s: float

    @property
    def log(self) -> Path:
        """Return the log file of the rank's output."""
        return self.folder / f"rank{self.rank}.log"

    @property
    def progress(self) -> Path:
        """Return the file of the rank's progress record."""
        return self.folder / f"rank{self.rank}.note"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Contents of a job's file: a pickled function with its arguments.

    `main` is the path of the script that the function refers to as `__main__`, or None.
    """

    payload: bytes
    main: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """The pickled result of a job on one rank."""

    payload: bytes


_in_rank: Final[list[int]] = []


def in_rank() -> bool:
    """Return True if this process is a rank that `serve` runs."""
    return bool(_in_rank)


def serve(order: RankOrder, connection: Connection) -> None:
    """Join the process group and run each job sent on `connection`; return when it closes."""
    _in_rank.append(order.rank)
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _redirect_output(order)
        note_to(ProgressRecord(order.progress))
    except OSError:  # the run ended while this rank was starting, and removed its folder
        _end_group()
    try:
        note("joining the process group")
        join(
            Placement(
                rank=order.rank,
                ranks=order.ranks,
                local_rank=order.rank,
                local_ranks=order.ranks,
            ),
            order.device,
            timeout_s=order.collective_timeout_s,
            store=order.folder / "store",
        )
        while True:
            note("waiting for a job")
            try:
                path = Path(os.fsdecode(connection.recv_bytes()))
            except EOFError:
                break
            note("starting a job")
            answer = pickle.dumps(_perform(order.rank, path))
            step_done(0)  # so that this job's steps do not count for the next one
            connection.send_bytes(answer)
    except BaseException as error:
        connection.send_bytes(pickle.dumps(failure_of(order.rank, error)))
    else:
        distributed.destroy_process_group()
    _end_group()


def _perform(rank: int, path: Path) -> RankResult | Failure:
    try:
        job: JobFile = pickle.loads(path.read_bytes())
        if job.main is not None:
            _import_main(job.main)
        function, arguments = _unpickled(job.payload)
        result = function(*arguments)
        note("the job is done, its result goes to the program")
        return RankResult(payload=pickle.dumps(result))
    except BaseException as error:
        return failure_of(rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _unpickled(payload: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    function, arguments = pickle.loads(payload)
    return function, arguments


def _import_main(path: str) -> None:
    """Import the parent's script as `__main__`, without the code under its main guard."""
    if getattr(sys.modules["__main__"], "__file__", None) == path:
        return
    module = ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _end_group()


def _end_group() -> None:
    """Kill this process and all processes that it has started."""
    os.killpg(0, signal.SIGKILL)


def _redirect_output(order: RankOrder) -> None:
    log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)
    if order.rank:
        os.dup2(log, 1)
    os.close(log)
    faulthandler.enable(2)
    faulthandler.register(STACKS_SIGNAL, 2, all_threads=True)
