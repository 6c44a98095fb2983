"""Worker processes that are watched: one that dies, hangs or is stopped is replaced by another.

`concurrent.futures` gives up all work when one of its processes dies, and waits for ever for one
that is stopped; of the packages that do better, loky gives up too, and pebble (LGPL) reads with all
workers from one pipe, whose lock a stopped worker may hold. Here each worker has a pipe of its own
and a thread that waits for it, so that it is known in which run it was.
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
from zsim.workers.worker import FinishedRun, RunBatch, run_each

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

LOOK_S: Final = 0.5
"""How often a worker that says nothing is looked at."""

STOPPED_S: Final = 5.0
"""How long a worker may be stopped: who stops a sweep with all its workers lets them go on."""

GRACE_S: Final = 10.0
"""What a run may take beyond its time, which its worker tells by itself unless it hangs."""

IDLE_S: Final = 30.0
"""How long a worker may sleep in a run without a moment on a core: runs compute, and wait for none.

CPython 3.11 waits for ever for a thread that found no memory as it began.
"""

_END: Final = "end of the batch"


class BatchLostError(Exception):
    """A worker was lost with its batch.

    Attributes:
        done: what it had finished, in order; None where nobody knows.
        is_to_blame: whether the run after these may have ended it.
    """

    def __init__(self, why: str, *, done: list[FinishedRun] | None, is_to_blame: bool) -> None:
        super().__init__(why)
        self.done = done
        self.is_to_blame = is_to_blame


class SupervisedWorkers(Executor):
    """Executor of batches on `workers` processes, each with at most `memory_bytes`."""

    def __init__(self, workers: int, memory_bytes: int) -> None:
        self._context = multiprocessing.get_context("forkserver")  # no fork of one with threads
        self._context.set_forkserver_preload(["zsim.workers.worker", "zsim_des"])
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

        `fn` is `run_batch`, which a worker does run by run.
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
        """End all workers; what they run is lost."""
        self._closed = True
        with self._starting:
            for worker in self._all:
                worker.kill()
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)


@dataclass(frozen=True, slots=True)
class _Look:
    """State of a thread as proc(5) has it ("S" sleeps, "T" is stopped), and its ticks on a core."""

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
        """Wait until the process has something to say.

        Raises:
            BatchLostError: it hangs, or is stopped.
        """
        begin = moved = monotonic()
        # Looks are counted: a clock goes on while this process is stopped with its workers.
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
        """Return what the thread of the process does that runs batches; nothing without /proc."""
        with suppress(OSError, IndexError):
            task = f"/proc/{self._process.pid}/task/{self._process.pid}/stat"
            stat = Path(task).read_text("utf-8").rpartition(")")[2].split()
            return _Look(state=stat[0], ticks=int(stat[11]) + int(stat[12]))
        return _Look(state="", ticks=0)

    def _end(self) -> str:
        """Return how the process ended."""
        self._process.join(GRACE_S)
        status = self._process.exitcode
        if status is None or status >= 0:
            return f"it ended with status {status}"
        name = signal.Signals(-status).name if -status in {*signal.Signals} else f"{-status}"
        return f"it was killed by {name}" + (
            " (out of memory, or by hand)" if -status == signal.SIGKILL else ""
        )

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join(GRACE_S)
        self._connection.close()


def serve(connection: Connection, memory_bytes: int) -> None:
    """Run batches that come through `connection` until it closes, each run in `memory_bytes`."""
    _follow()
    with unbounded_memory():  # outside of a run: what to say of memory that ran out needs some
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
    """End this worker with the process that started it, however that ends.

    Ctrl-C is for the other, which ends its workers; and if it was killed, nobody else does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    with small_stacks():
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
