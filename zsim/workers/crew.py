"""Crews that run batches: this process, all cores, or a Dask cluster, as `concurrent.futures`."""

import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import socket
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from zsim.mistake import MistakeError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

CONNECT_S = 20
"""How long a scheduler may take to answer, in seconds."""

ADDRESS = re.compile(r"(?:(?:tcp|tls)://)?(?P<host>[^:/]+|\[[^]/]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """An executor, how many batches it runs at a time, and whether other machines do."""

    executor: Executor
    workers: int
    remote: bool = False


class InProcess(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(
        self,
        fn: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Return a future that is done."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def cores() -> int:
    """Return processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def crew(workers: int, scheduler: str | None) -> Generator[Crew]:
    """Start processes of this machine, or use all workers of the Dask cluster at `scheduler`.

    When it is left early, what runs is ended.

    Raises:
        MistakeError: there is no scheduler at that address, or no package for it.
    """
    if scheduler is not None:
        yield from _cluster(scheduler)
    elif workers == 1:
        yield Crew(executor=InProcess(), workers=1)
    else:
        yield from _processes(workers)


def _processes(workers: int) -> Generator[Crew]:
    context = multiprocessing.get_context("forkserver")  # no fork of a process with threads
    context.set_forkserver_preload(["zsim.workers.worker", "zsim_des"])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_follow)
    done = False
    try:
        yield Crew(executor=pool, workers=workers)
        done = True
    finally:
        if not done:
            for child in multiprocessing.active_children():
                child.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _follow() -> None:
    """End this worker with the process that started it, however that ends.

    Ctrl-C is for the other, which ends its workers; and if it was killed, nobody else does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def _cluster(address: str) -> Generator[Crew]:
    try:
        distributed: Any = import_module("distributed")
    except ModuleNotFoundError as error:
        raise MistakeError(f"--scheduler: needs {error.name}: pip install 'zsim[dask]'") from None
    _need_answer(address)
    for name in ("distributed", "distributed.client"):  # what matters comes as an exception
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with distributed.Client(address, timeout=CONNECT_S, set_as_default=False) as client:
        workers: int = sum(client.nthreads().values())
        if not workers:
            raise MistakeError(f"--scheduler: {address!r}: the cluster has no workers")
        executor: Executor = client.get_executor(pure=False)
        try:
            yield Crew(executor=executor, workers=workers, remote=True)
        finally:
            executor.shutdown(wait=False)


def _need_answer(address: str) -> None:
    """Raise unless somebody listens at `address`: a client of Dask would say so at length.

    Raises:
        MistakeError: nobody does, or it is no address.
    """
    found = ADDRESS.fullmatch(address)
    if found is None:
        raise MistakeError(f"--scheduler: {address!r} must be HOST:PORT, or tcp://HOST:PORT")
    where = found["host"].strip("[]"), int(found["port"])
    try:
        socket.create_connection(where, timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise MistakeError(f"--scheduler: {address!r}: {str(error).lower()}") from None
