"""Crews that run batches: this process, all cores, or a Dask cluster, as `concurrent.futures`."""

from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from zsim.limits import limits
from zsim.workers.dask_cluster import dask_cluster
from zsim.workers.limited_run import free_memory_bytes
from zsim.workers.processes import InProcess
from zsim_study.workers.supervised import SupervisedWorkers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """An executor, its number of parallel batches, and whether it runs on other machines.

    `lost` returns why no worker is left, or "".
    """

    executor: Executor
    workers: int
    remote: bool = False
    lost: Callable[[], str] = str


@contextmanager
def worker_pool(workers: int, scheduler: str | None) -> Generator[WorkerPool]:
    """Start processes of this machine, or use all workers of the Dask cluster at `scheduler`.

    If the block exits early, running batches are ended.

    Raises:
        MistakeError: there is no scheduler at that address, or Dask is not installed.
    """
    if scheduler is not None:
        with dask_cluster(scheduler) as found:
            yield WorkerPool(
                executor=found.executor, workers=found.workers, remote=True, lost=found.lost
            )
    elif workers == 1:
        yield WorkerPool(executor=InProcess(), workers=1)
    else:
        yield from _processes(workers)


def _processes(workers: int) -> Generator[WorkerPool]:
    most = limits()
    memory = most.run_memory_bytes or (most.memory_bytes or free_memory_bytes()) // workers
    pool = SupervisedWorkers(workers, memory)
    try:
        yield WorkerPool(executor=pool, workers=workers)
    finally:
        pool.shutdown(cancel_futures=True)
