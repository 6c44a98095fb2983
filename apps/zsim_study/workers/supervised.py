"""Supervised worker processes: a worker that dies, hangs or is stopped is replaced.

`concurrent.futures` gives up all work when one of its processes dies, and waits forever for a
stopped one. Other packages do not solve this: loky also gives up, and pebble (LGPL) reads with all
workers from one pipe, whose lock a stopped worker may hold. Here each worker has a separate pipe
and a thread that waits for it, so the run in which it was lost is known.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from threading import Lock, Thread, local
from time import monotonic  # noqa: TID251  (a worker that hangs is seen by a clock alone)
from typing import Any, Final, ParamSpec, TypeVar, cast

from zsim.workers.memory_bound import small_stacks, unbounded_memory
from zsim_study.workers.worker import FinishedRun, RunBatch, run_each

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LOOK_S: Final = 0.5
"""Interval in seconds at which a silent worker is checked."""

STOPPED_S: Final = 5.0
"""Seconds for which a worker may be stopped. A sweep stopped with all its workers may resume."""

GRACE_S: Final = 10.0
"""Seconds beyond its time limit for a run, whose worker reports the limit unless it hangs."""

IDLE_S: Final = 30.0
"""Seconds for which a worker may sleep in a run without CPU time: runs compute and never wait.

CPython 3.11 waits forever for a thread that had no memory at its start.
"""

_END: Final = "end of the batch"


class BatchLostError(Exception):
    """A worker was lost with its batch.

    Attributes:
        done: its finished runs, in order; None if unknown.
        is_to_blame: whether the next run may have ended the worker.
    """

    def __init__(self, why: str, *, done: list[FinishedRun] | None, is_to_blame: bool) -> None:
        super().__init__(why)
        self.done = done
        self.is_to_blame = is_to_blame


class SupervisedWorkers(Executor):
    """Executor of batches on `workers` processes, each with at most `memory_bytes`."""

    def __init__(self, workers: int, memory_bytes: int) -> None:
        self._context = multiprocessing.get_context("forkserver")  # forks no process with threads
        self._context.set_forkserver_preload(["zsim_study.workers.worker", "zsim_des"])
        self._memory_bytes = memory_bytes
        self._threads = ThreadPoolExecutor(workers)
        self._own = local()
        self._all: list[_Worker] = []
        self._starting = Lock()
        self._closed = False

    def submit(
        self,
        fn: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Run the batch `args[0]`; its future raises BatchLostError if the worker is lost.

        `fn` must be `run_batch`; the worker executes it run by run.
        """
        (batch,) = cast("tuple[RunBatch]", args)
        with small_stacks():
            return cast("Future[Result]", self._threads.submit(self._run, batch))

    def _run(self, batch: RunBatch) -> list[FinishedRun]:
        worker: _Worker | None = getattr(self._own, "worker", None)
        if worker is None:
            with self._starting:
                worker = self._own.worker = _Worker(self._context, self._memory_bytes)
                self._all.append(worker)
            if self._closed:
                worker.kill()
        try:
            return worker.run(batch)
        except BaseException:
            self._own.worker = None
            with self._starting:
                self._all.remove(worker)
            worker.kill()
            raise

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """End all workers; their running batches are lost."""
        self._closed = True
        with self._starting:
            for worker in self._all:
                worker.kill()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)


@dataclass(frozen=True, slots=True)
class _Look:
    """State of a thread as in proc(5) ("S" sleeps, "T" is stopped), and its CPU ticks."""

    state: str
    ticks: int


class _Worker:
    """One process, and the pipe to it."""

    def __init__(self, context: ForkServerContext, memory_bytes: int) -> None:
        self._connection, theirs = context.Pipe()
        self._process: ForkServerProcess = context.Process(
            target=serve, args=(theirs, memory_bytes), daemon=True
        )
        with theirs:
            self._process.start()

    def run(self, batch: RunBatch) -> list[FinishedRun]:
        """Return the finished runs of `batch`.

        Raises:
            BatchLostError: the process is lost.
            RunFailedError: it refuses the batch.
        """
        done: list[FinishedRun] = []
        try:
            self._connection.send(batch)
            while True:
                self._wait(batch.limits.run_time_s + GRACE_S, done)
                answer: Any = self._connection.recv()
                if isinstance(answer, FinishedRun):
                    done.append(answer)
                elif isinstance(answer, Exception):
                    raise answer
                else:
                    return done
        except (EOFError, OSError):
            raise BatchLostError(self._end(), done=done, is_to_blame=True) from None

    def _wait(self, patience_s: float, done: list[FinishedRun]) -> None:
        """Wait until the process sends a message.

        Raises:
            BatchLostError: it hangs, or is stopped.
        """
        begin = moved = monotonic()
        # Checks are counted: a clock would continue while this process and its workers are stopped.
        idle_looks, before = 0, self._look()
        while not self._connection.poll(LOOK_S):
            now, look = monotonic(), self._look()
            idle_looks = idle_looks + 1 if look == before and look.state == "S" else 0
            before = look
            if look.state not in {"T", "t"}:
                moved = now
            if now - moved > STOPPED_S:
                raise BatchLostError("it was stopped", done=done, is_to_blame=False)
            if idle_looks * LOOK_S > IDLE_S:
                why = f"it did nothing for {IDLE_S:.3g} s"
                raise BatchLostError(why, done=done, is_to_blame=True)
            if now - begin > patience_s:
                why = f"it said nothing for {patience_s:.3g} s"
                raise BatchLostError(why, done=done, is_to_blame=True)

    def _look(self) -> "_Look":
        """Return the state of the main thread, which runs batches; empty without /proc."""
        with suppress(OSError, IndexError):
            task = f"/proc/{self._process.pid}/task/{self._process.pid}/stat"
            stat = Path(task).read_text("utf-8").rpartition(")")[2].split()
            return _Look(state=stat[0], ticks=int(stat[11]) + int(stat[12]))
        return _Look(state="", ticks=0)

    def _end(self) -> str:
        """Return a description of how the process ended."""
        self._process.join(GRACE_S)
        status = self._process.exitcode
        if status is None or status >= 0:
            return f"it ended with status {status}"
        name = signal.Signals(-status).name if -status in {*signal.Signals} else f"{-status}"
        return f"it was killed by {name}" + (
            " (out of memory, or by hand)" if -status == signal.SIGKILL else ""
        )

    def kill(self) -> None:
        """End the process, whatever its state."""
        self._process.kill()
        self._process.join(GRACE_S)
        self._connection.close()


def serve(connection: Connection, memory_bytes: int) -> None:
    """Run batches received from `connection` until it closes, each run in `memory_bytes`."""
    _follow()
    with unbounded_memory():  # outside of runs: reporting a lack of memory needs memory
        while True:
            try:
                batch: RunBatch = connection.recv()
            except EOFError:
                return
            try:
                for found in run_each(batch, memory_bytes):
                    connection.send(found)
            except Exception as error:  # of the batch, not of a run
                connection.send(error)
            else:
                connection.send(_END)


def _follow() -> None:
    """End this worker when the process that started it ends, for any reason.

    Ctrl-C is handled by that process, which ends its workers. If it is killed, this is the only
    mechanism that ends them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with small_stacks():
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
