"""Crews that run batches: this process, all cores, or a Dask cluster, as `concurrent.futures`."""

import logging
import re
import socket
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

from zsim.limits import limits
from zsim.mistake import MistakeError
from zsim.workers.limited_run import free_memory_bytes
from zsim.workers.processes import InProcess
from zsim_study.workers.supervised import SupervisedWorkers

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

CONNECT_S = 20
"""Maximum time for a scheduler to answer, in seconds."""

ADDRESS = re.compile(r"(?:(?:tcp|tls)://)?(?P<host>[^:/]+|\[[^]/]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """An executor, its number of parallel batches, and whether it runs on other machines.

    `lost` returns why no worker is left, or "".
    """

    executor: Executor
    workers: int
    remote: bool = False
    lost: Callable[[], str] = str


@contextmanager
def crew(workers: int, scheduler: str | None) -> Generator[Crew]:
    """Start processes of this machine, or use all workers of the Dask cluster at `scheduler`.

    If the block exits early, running batches are ended.

    Raises:
        MistakeError: there is no scheduler at that address, or Dask is not installed.
    """
    if scheduler is not None:
        yield from _cluster(scheduler)
    elif workers == 1:
        yield Crew(executor=InProcess(), workers=1)
    else:
        yield from _processes(workers)


def _processes(workers: int) -> Generator[Crew]:
    most = limits()
    memory = most.run_memory_bytes or (most.memory_bytes or free_memory_bytes()) // workers
    pool = SupervisedWorkers(workers, memory)
    try:
        yield Crew(executor=pool, workers=workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _cluster(address: str) -> Generator[Crew]:
    try:
        distributed: Any = import_module("distributed")
    except ModuleNotFoundError as error:
        raise MistakeError(f"--scheduler: needs {error.name}: pip install 'zsim[dask]'") from None
    _need_answer(address)
    for name in ("distributed", "distributed.client", "tornado.application", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with distributed.Client(address, timeout=CONNECT_S, set_as_default=False) as client:
        workers: int = sum(client.nthreads().values())
        if not workers:
            raise MistakeError(f"--scheduler: {address!r}: the cluster has no workers")
        executor: Executor = client.get_executor(pure=False)

        def lost() -> str:
            try:
                client.sync(client.scheduler.identity, callback_timeout=CONNECT_S)
            except Exception as error:  # any error means that no work is distributed
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                return f"the scheduler at {address} does not answer: {why}"
            return ""

        try:
            yield Crew(executor=executor, workers=workers, remote=True, lost=lost)
        finally:
            executor.shutdown(wait=False)


def _need_answer(address: str) -> None:
    """Raise MistakeError unless a server listens at `address`; Dask's own error is long.

    Raises:
        MistakeError: there is no server, or it is not an address.
    """
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise MistakeError(f"--scheduler: {address!r} must be HOST:PORT, or tcp://HOST:PORT")
    where = found["host"].strip("[]"), int(found["port"])
    try:
        socket.create_connection(where, timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise MistakeError(f"--scheduler: {address!r}: {str(error).lower()}") from None
