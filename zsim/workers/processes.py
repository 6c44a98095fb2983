"""Executors of functions: this process, or others on all cores."""

import gc
import os
import signal
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class InProcess(Executor):
    """Runs submitted functions immediately, in this process."""

    def submit(
        self,
        fn: Callable[Arguments, Result],
        /,
        *args: Arguments.args,
        **kwargs: Arguments.kwargs,
    ) -> Future[Result]:
        """Run `fn` and return a completed future."""
        future: Future[Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def processes(workers: int) -> Generator[Executor]:
    """Yield an executor in this process, or on `workers` others without garbage collection.

    If the block exits early, the other processes are ended.
    """
    if workers == 1:
        yield InProcess()
        return
    others = {*active_children()}
    with ProcessPoolExecutor(workers, initializer=_begin) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for each in {*active_children()} - others:
                each.terminate()
            raise


def _begin() -> None:
    """Leave Ctrl-C to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
