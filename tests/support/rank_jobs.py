"""What tests of ranks let them do. It imports little: fresh ranks import it again."""

import os
import signal
import subprocess
import sys
import time

import torch
from torch import distributed

from zsim_torch.ranks import run_ranks
from zsim_torch.whereabouts import note


def sum_of_ranks() -> float:
    total = torch.full((3,), float(distributed.get_rank()))
    distributed.all_reduce(total)
    return float(total[0])


def place_and_threads() -> tuple[int, int, int]:
    return distributed.get_rank(), distributed.get_world_size(), torch.get_num_threads()


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
