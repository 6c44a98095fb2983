"""Local ranks: start them, run jobs on all of them, collect results, and always end them.

    with RankPool(4) as pool:
        results = pool.run(function, argument)    # function(argument) on each rank, by rank

Ranks are forked from a server that has already imported torch: 0.15 s for four ranks, after one or
two seconds to start the server. They form one process group (see `process_group`). If a rank
raises, dies or stops making progress, all ranks are ended. The error starts with that rank's own
message in one line, and names a file with stacks and output. After a failure, the pool starts new
ranks for its next job, since a failed collective closes Gloo's connections permanently.

Functions, arguments and results are pickled. If the function is defined in the calling script, the
script needs the usual guard, `if __name__ == "__main__":`.
"""

import atexit
import os
import pickle
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Final, Self, TypeVar

from zsim_torch.supervise.diagnosis import (
    Seen,
    account,
    blamed,
    is_stopped,
    shows_wait,
    story,
)
from zsim_torch.supervise.diagnosis import waiting as who_waits
from zsim_torch.supervise.orphan_reaper import OrphanReaper, end_group
from zsim_torch.supervise.process_group import LOADED_LATE, DeviceChoice, under_torchrun
from zsim_torch.supervise.progress_record import LastProgress, ProgressRecord
from zsim_torch.supervise.rank_failure import Cause, Failure, RankFailedError, death, origin
from zsim_torch.supervise.rank_process import (
    STACKS_SIGNAL,
    JobFile,
    RankOrder,
    RankResult,
    in_rank,
    serve,
)
from zsim_torch.supervise.torchrun import run_joined

Result = TypeVar("Result")

TIMEOUT_S: Final = 60.0
"""Seconds without progress on any rank after which a run fails."""

_GRACE_S: Final = 2.0
"""Seconds to wait for the cause when ranks have lost a peer but none has reported why."""

_TELL_S: Final = 0.1
"""Seconds between reports of finished steps."""

_STACKS_S: Final = 0.3
_CLOSE_S: Final = 1.0
_CONTEXT: Final = get_context("forkserver")

FROZEN_LAST: Final = "zsim_torch.supervise.frozen_imports"
"""The last module that the fork server preloads."""


class RankPool:
    """`ranks` local processes in one process group, used for any number of jobs.

    The first job starts them. A job fails after `timeout_s` seconds without progress, which is a
    call of `progress_record.note` on any rank or the end of the job on a rank. It may be lowered
    between jobs, but not raised. The output of ranks, except rank 0's standard output, is kept for
    the details of a failure.

    Raises:
        ValueError: `ranks` or `timeout_s` is not positive, or this process is a rank itself.
    """

    def __init__(
        self,
        ranks: int,
        *,
        timeout_s: float = TIMEOUT_S,
        device: DeviceChoice = DeviceChoice.CPU,
    ) -> None:
        if ranks < 1:
            raise ValueError(f"ranks: {ranks} must be at least 1")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: {timeout_s} must be more than 0")
        if in_rank():
            raise ValueError(
                "ranks: a rank cannot start ranks; in a script, the call belongs under "
                'if __name__ == "__main__":'
            )
        self.ranks = ranks
        self.timeout_s = timeout_s
        self.device = device
        self._job_count = 0
        self._running: _Running | None = None

    def run(
        self,
        function: Callable[..., Result],
        *arguments: object,
        on_steps: Callable[[int], object] | None = None,
    ) -> tuple[Result, ...]:
        """Call `function(*arguments)` on every rank and return the results by rank.

        `on_steps` is called with the number of steps that all ranks have finished, as recorded by
        `progress_record.step_done`.

        Raises:
            RankFailedError: a rank raised, died or made no progress for `timeout_s` seconds.
        """
        if self._running is None:
            self._running = _Running(self.ranks, self.timeout_s, self.device)
        self._running.timeout_s = self.timeout_s
        self._job_count += 1
        try:
            results = self._running.run(self._job_count, function, arguments, on_steps)
        except BaseException:
            running, self._running = self._running, None
            running.kill()
            running.end()
            raise
        return tuple(results)

    def close(self) -> None:
        """End all processes of the pool. A later job starts new ones."""
        running, self._running = self._running, None
        if running is not None:
            running.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_ranks(
    function: Callable[..., Result],
    *arguments: object,
    ranks: int,
    timeout_s: float = TIMEOUT_S,
    device: DeviceChoice = DeviceChoice.CPU,
    on_steps: Callable[[int], object] | None = None,
) -> tuple[Result, ...]:
    """Call `function(*arguments)` on `ranks` new local ranks and return the results by rank.

    `on_steps` is called with the number of steps that all ranks have finished. Under torchrun no
    rank is started and `on_steps` is not called: every process calls this function as one rank, and
    gets all results.

    Raises:
        RankFailedError: a rank raised, died or made no progress for `timeout_s` seconds.
        ValueError: `ranks` or `timeout_s` is not positive, or differs from torchrun's number of
            ranks.
    """
    placement = under_torchrun()
    if placement is not None:
        if placement.ranks != ranks:
            raise ValueError(f"ranks: {ranks} are asked for, torchrun started {placement.ranks}")
        return run_joined(placement, function, *arguments, timeout_s=timeout_s, device=device)
    with RankPool(ranks, timeout_s=timeout_s, device=device) as pool:
        return pool.run(function, *arguments, on_steps=on_steps)


class _Running:
    """The running processes of a pool."""

    def __init__(self, ranks: int, timeout_s: float, device: DeviceChoice) -> None:
        self.timeout_s = timeout_s
        self.folder = Path(tempfile.mkdtemp(prefix="zsim-ranks-"))
        self.processes: list[ForkServerProcess] = []
        self.connections: list[Connection] = []
        self.progress: list[ProgressRecord] = []
        self.orders = [
            RankOrder(
                rank=rank,
                ranks=ranks,
                folder=self.folder,
                device=device,
                # Longer than the pool's timeout, whose report says more than a failed collective.
                collective_timeout_s=2 * timeout_s + 2 * _GRACE_S,
            )
            for rank in range(ranks)
        ]
        with _prepared():
            self.reaper = OrphanReaper(_CONTEXT, self.folder)
        atexit.register(self.end)
        try:
            for order in self.orders:
                self._start(order)
        except BaseException:
            self.end()
            raise

    def _start(self, order: RankOrder) -> None:
        self.progress.append(ProgressRecord(order.progress))
        ours, theirs = _CONTEXT.Pipe()
        self.connections.append(ours)
        process = _CONTEXT.Process(target=serve, args=(order, theirs), name=f"rank{order.rank}")
        with theirs, _prepared():
            process.start()
        self.processes.append(process)
        assert process.pid is not None
        self.reaper.mind(process.pid)

    def run(
        self,
        number: int,
        function: Callable[..., Result],
        arguments: tuple[object, ...],
        on_steps: Callable[[int], object] | None,
    ) -> list[Result]:
        """Run one job and return its results by rank."""
        payload = pickle.dumps((function, arguments))
        path = self.folder / f"job{number}"
        main = getattr(sys.modules["__main__"], "__file__", None)
        refers_to_main = b"__main__" in payload and main is not None
        path.write_bytes(
            pickle.dumps(JobFile(payload=payload, main=main if refers_to_main else None))
        )
        for connection in self.connections:
            with suppress(OSError):  # it has died: `_watch` reports it
                connection.send_bytes(os.fsencode(path))
        done, failures = self._watch(on_steps)
        if failures:
            raise self._failed(failures)
        path.unlink()
        return [pickle.loads(done[rank].payload) for rank in sorted(done)]

    def _watch(
        self, on_steps: Callable[[int], object] | None
    ) -> tuple[dict[int, RankResult], list[Failure]]:
        """Wait until every rank is done, or until a failure explains all others."""
        done: dict[int, RankResult] = {}
        failures: list[Failure] = []
        seen: list[LastProgress] = []
        now = time.monotonic()
        deadline = now + self.timeout_s
        told = 0
        often = () if on_steps is None else (_TELL_S,)
        while len(done) + len(failures) < len(self.processes):
            failed = {failure.rank for failure in failures}
            waiting = [rank for rank in range(len(self.processes)) if rank not in done]
            waiting = [rank for rank in waiting if rank not in failed]
            ready = wait(
                [self.connections[rank] for rank in waiting]
                + [self.processes[rank].sentinel for rank in waiting],
                min(max(deadline - now, 0), self.timeout_s / 10, *often),
            )
            now = time.monotonic()
            for rank in waiting:
                if {self.connections[rank], self.processes[rank].sentinel} & set(ready):
                    match self._answer(rank):
                        case RankResult() as answer:
                            done[rank] = answer
                        case Failure() as failure:
                            if not failures:
                                deadline = now + _GRACE_S
                            failures.append(failure)
            if any(failure.cause is not Cause.LOST_ITS_PEER for failure in failures):
                break
            notes = [each.read() for each in self.progress]
            if on_steps is not None and (steps := min(each.steps for each in notes)) > told:
                told = steps
                on_steps(told)
            if not failures and (ready or notes != seen):
                seen, deadline = notes, now + self.timeout_s
            if now >= deadline:
                failures = failures or [self._hang(waiting)]
                break
        return done, failures

    def _answer(self, rank: int) -> RankResult | Failure:
        """Return the answer of `rank`, or its death."""
        try:
            answer: RankResult | Failure = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, OSError):
            process = self.processes[rank]
            process.join(_CLOSE_S)
            note = self.progress[rank].read()
            return death(rank, process.exitcode, Seen(rank=rank, note=note).where)
        return answer

    def _hang(self, waiting_ranks: list[int]) -> Failure:
        """Return the failure of the rank that blocks the others, as `blamed` selects it."""
        for rank in waiting_ranks:
            pid = self.processes[rank].pid
            assert pid is not None
            with suppress(OSError):
                os.kill(pid, STACKS_SIGNAL)
        time.sleep(_STACKS_S)
        seen = [one for one in self._seen() if one.rank in waiting_ranks]
        first = blamed(seen)
        how = f"no progress for {self.timeout_s:.3g} s, last seen: {first.where}"
        return Failure(rank=first.rank, cause=Cause.HUNG, message=f"{account(first, seen)}{how}")

    def _failed(self, failures: list[Failure]) -> RankFailedError:
        first = origin(failures)
        seen = self._seen(failures)
        self.kill()
        told = who_waits(seen, without=first.rank)
        line = replace(first, message=f"{first.message}; {told}") if told else first
        report: list[str] = []
        for failure in sorted(failures, key=lambda each: (each is not first, each.rank)):
            report += [f"== {failure.line}", failure.details]
        for one in seen:
            report += [f"== {story(one, seen)}", self._log(one.rank)]
        return RankFailedError(line, report)

    def _seen(self, failures: Sequence[Failure] = ()) -> list[Seen]:
        """Return the current state of every rank."""
        gone = {each.rank for each in failures if each.cause in (Cause.DIED, Cause.RAISED)}
        pids = [process.pid for process in self.processes]
        return [
            Seen(
                rank=rank,
                note=self.progress[rank].read(),
                gone=rank in gone,
                stopped=pid is not None and is_stopped(pid),
                in_collective=shows_wait(self._log(rank)),
            )
            for rank, pid in enumerate(pids)
        ]

    def _log(self, rank: int) -> str:
        log = self.orders[rank].log
        return log.read_text("utf-8", "replace") if log.exists() else ""

    def kill(self) -> None:
        """Kill every rank and its children."""
        for process in self.processes:
            assert process.pid is not None
            end_group(process.pid)
            process.kill()
        for process in self.processes:
            process.join()

    def end(self) -> None:
        """End every rank, by force if needed, and remove all files."""
        atexit.unregister(self.end)
        for connection in self.connections:
            connection.close()
        deadline = time.monotonic() + _CLOSE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self.processes:
            process.close()
        for record in self.progress:
            record.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.reaper.dismiss()


@contextmanager
def _prepared() -> Generator[None]:
    """Return a context in which the server preloads torch, but not this process's main script.

    multiprocessing would run the script in each process; a rank runs it only if a job refers to it.
    """
    preloaded = ["zsim_torch", serve.__module__, LOADED_LATE, FROZEN_LAST]
    _CONTEXT.set_forkserver_preload(preloaded)
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
