"""What tests of ranks let them do. It imports little: fresh ranks import it again."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import distributed

from zsim.backend.backend import Job
from zsim.schedule.operation import Operation
from zsim.trace.trace import Trace
from zsim_torch.backend import Assignment, train_on_rank
from zsim_torch.execute.executor import Executor
from zsim_torch.execute.flights import PendingWork, StreamEntry
from zsim_torch.execute.streams import CpuStreams
from zsim_torch.supervise.progress_record import note, step_done
from zsim_torch.supervise.ranks import run_ranks


def sum_of_ranks() -> float:
    total = torch.full((3,), float(distributed.get_rank()))
    distributed.all_reduce(total)
    return float(total[0])


def place_and_threads() -> tuple[int, int, int]:
    return distributed.get_rank(), distributed.get_world_size(), torch.get_num_threads()


def cores_of_threads() -> list[tuple[str, tuple[int, ...]]]:
    """Return the names of this process's threads, and the cores that each may run on."""
    sum_of_ranks()  # Gloo has all its threads
    own = threading.get_native_id()
    found: list[tuple[str, tuple[int, ...]]] = []
    for task in Path("/proc/self/task").iterdir():
        number = int(task.name)
        with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
            name = "main" if number == own else (task / "comm").read_text().strip()
            found.append((name, tuple(sorted(os.sched_getaffinity(number)))))
    return found


def pid_after_child() -> int:
    """A rank that has started a process of its own, which would outlive it."""
    subprocess.Popen(["sleep", "100"])
    return os.getpid()


def raise_on(rank: int, message: str) -> None:
    if distributed.get_rank() == rank:
        raise ValueError(message)
    sum_of_ranks()


def exit_on(rank: int, status: int) -> None:
    if distributed.get_rank() == rank:
        os._exit(status)
    sum_of_ranks()


def kill_on(rank: int) -> None:
    if distributed.get_rank() == rank:
        sys.stderr.write("the last words")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    sum_of_ranks()


def hang_on(rank: int) -> None:
    note("step 0: before the collective")
    if distributed.get_rank() == rank:
        note("step 0: a long sleep")
        time.sleep(1000)
    sum_of_ranks()


def stop_on(rank: int) -> None:
    """A rank that cannot even say where it stands."""
    if distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    sum_of_ranks()


def hang_in_a_collective(missing: int) -> None:
    if distributed.get_rank() != missing:
        sum_of_ranks()


def slow_but_moving(seconds: float) -> int:
    for step in range(10):
        note(f"step {step}")
        time.sleep(seconds / 10)
    return distributed.get_rank()


def return_a_lambda() -> object:
    return lambda: None


def start_ranks_inside() -> None:
    run_ranks(sum_of_ranks, ranks=1)


def strike(job: Job, rank: int, at: str, how: signal.Signals, in_flight: bool) -> Trace:
    """Train; rank `rank` gets the signal `how` when it comes to the operation that `at` ends.

    With `in_flight` that is a collective, which it has handed over before.
    """
    if distributed.get_rank() == rank:
        if not at:
            os.kill(os.getpid(), how)
        _strike_at(at, how, in_flight=in_flight)
    trace = train_on_rank(Assignment(job=job, seed=0, data=None, poison=False))
    if at == "end":
        _meet_at_the_end(rank, how)
    return trace


REACHED_S = 0.5
"""Seconds before a rank is struck, in which the others come to where they wait for it."""


def _strike_at(at: str, how: signal.Signals, *, in_flight: bool) -> None:
    if in_flight:
        communicate = CpuStreams.communicate

        def struck(
            self: CpuStreams, entry: StreamEntry, issue: Callable[[], list[PendingWork]]
        ) -> None:
            communicate(self, entry, issue)
            if entry.operation.endswith(at) and self.step > 0:
                os.kill(os.getpid(), how)

        CpuStreams.communicate = struck  # type: ignore[method-assign]  # this process ends with it
        return
    bound = Executor._bound  # pyright: ignore[reportPrivateUsage]

    def bound_to_strike(self: Executor, operation: Operation) -> Callable[[], None]:
        issue = bound(self, operation)

        def strike_one() -> None:
            if operation.id.endswith(at) and self.step != 0:
                time.sleep(REACHED_S)
                os.kill(os.getpid(), how)
            issue()

        return strike_one

    Executor._bound = bound_to_strike  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]


def _meet_at_the_end(rank: int, how: signal.Signals) -> None:
    note("the run is over")
    if distributed.get_rank() == rank:
        os.kill(os.getpid(), how)
    distributed.barrier()


def step_when_it_is_told(folder: str) -> None:
    """Do three steps; after each wait until a file says that it was told, 30 s at most."""
    for step in (1, 2, 3):
        step_done(step)
        for _ in range(3000):
            if Path(folder, str(step)).exists():
                break
            time.sleep(0.01)
        else:
            raise AssertionError(f"step {step} was not told")
