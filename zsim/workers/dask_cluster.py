"""The workers of a Dask cluster as an executor."""

import logging
import re
import socket
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from zsim.mistake import MistakeError

CONNECT_S = 20
"""Maximum time for a scheduler to answer, in seconds."""

ADDRESS = re.compile(r"(?:(?:tcp|tls)://)?(?P<host>[^:/]+|\[[^]/]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskCluster:
    """An executor on a cluster, and its number of threads; `lost` says why none is left, or ""."""

    executor: Executor
    workers: int
    lost: Callable[[], str]


@contextmanager
def dask_cluster(address: str) -> Generator[DaskCluster]:
    """Connect to the scheduler at `address`; if the block exits early, running work is cancelled.

    Raises:
        MistakeError: there is no scheduler at that address, or Dask is not installed.
    """
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
            yield DaskCluster(executor=executor, workers=workers, lost=lost)
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
