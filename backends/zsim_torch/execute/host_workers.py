"""Threads for the host operations of a schedule: one per host thread and I/O handle.

Operations are queued in the order of issue, each with its dependencies; a thread runs its queue
first in, first out. The host does not block, except where a schedule says so or where the host
itself is the stream that needs a result. Torch and the kernel's I/O release the GIL, so threads run
in parallel with each other and with the host.

The dependencies of an operation are issued before it, so threads cannot deadlock. After a failure
all later operations fail without running; every waiter gets the first error.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, Protocol

import torch

from zsim.schedule.operation import Edge, Previous, Read, Write, walk
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import Event
from zsim_torch.supervise.progress_record import note, progressed

PS_PER_NS: Final = 1000

_CLOSE_S: Final = 5.0
"""Seconds to wait at the end of a run for a running operation; then its thread is abandoned."""


class HostWorkError(RuntimeError):
    """An operation on a thread of the host or an I/O handle failed; the message names it."""


class Awaitable(Protocol):
    """An operation in flight that a thread can wait for."""

    def wait(self) -> None:
        """Block the calling thread until the operation is done."""
        ...

    def is_over(self) -> bool:
        """Return True if the operation is done."""
        ...


class WorkerEntry(Protocol):
    """An operation, as streams see it."""

    @property
    def operation(self) -> str:
        """Id of the operation."""
        ...

    @property
    def stream(self) -> str:
        """Stream or thread of the operation."""
        ...

    @property
    def after(self) -> tuple[Edge, ...]:
        """Operations that it depends on."""
        ...


@dataclass(slots=True, eq=False)
class HostJob:
    """A job of a thread; without a name it is not an operation of the schedule."""

    operation: str
    step: int
    stream: str
    action: Callable[[], None] | None
    awaited: Sequence[Awaitable]
    start_ns: int = 0
    end_ns: int = 0
    error: HostWorkError | None = None
    _finished: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block the calling thread until the job is done.

        Raises:
            HostWorkError: the job, or one before it, has failed.
        """
        self._finished.wait()
        if self.error is not None:
            raise self.error

    def is_over(self) -> bool:
        """Return True if the job has run or failed."""
        return self._finished.is_set()

    def run(self, failed: HostWorkError | None) -> HostWorkError | None:
        """Wait for dependencies, run the action, and return the error if something has failed."""
        self.error = failed
        try:
            if failed is None:
                for each in self.awaited:
                    each.wait()
                self.start_ns = time.perf_counter_ns()
                if self.action is not None:
                    self.action()
        except HostWorkError as error:
            self.error = error
        except BaseException as error:  # the host must learn of any error
            self.error = HostWorkError(f"{self.where}: {_reason(error)}")
            self.error.__cause__ = error
        self.end_ns = time.perf_counter_ns()
        self.action, self.awaited = None, ()  # release their references
        self._finished.set()
        progressed()
        return self.error

    @property
    def where(self) -> str:
        """Return the operation and its step, for messages."""
        name = self.operation or f"a free on {self.stream}"
        return name if self.step < 0 else f"{name} in step {self.step}"


def worker_streams(schedule: Schedule, program: Program) -> tuple[str, ...]:
    """Return the streams that are host threads or I/O handles."""
    handles = {
        operation.stream
        for part in (program.setup, program.step)
        for operation in walk(part)
        if isinstance(operation, Read | Write)
    }
    return tuple(
        name for name in schedule.streams if name in handles or name in schedule.host_threads
    )


class HostWorkers:
    """The threads of a rank, by stream, and their jobs."""

    def __init__(self, streams: Iterable[str] = ()) -> None:
        self._queues = {name: SimpleQueue[HostJob | None]() for name in streams}
        self.exist = bool(self._queues)
        self._threads: dict[str, threading.Thread] = {}
        self._current: dict[str, HostJob] = {}
        self._previous: dict[str, HostJob] = {}
        self._last: dict[str, HostJob] = {}
        self._named: list[HostJob] = []
        self._failed: list[HostWorkError] = []

    def has(self, stream: str) -> bool:
        """Return True if `stream` is a thread of this rank."""
        return stream in self._queues

    def takes(
        self,
        entry: WorkerEntry,
        step: int,
        action: Callable[[], None],
        awaited: Iterable[Awaitable],
    ) -> bool:
        """Queue `action` if the stream of `entry` is a thread; return True if it is.

        Raises:
            HostWorkError: a job has failed.
        """
        if not self.has(entry.stream):
            return False
        after = entry.after
        self.hand_over(entry.operation, step, entry.stream, action, after=after, awaited=awaited)
        return True

    def hand_over(
        self,
        operation: str,
        step: int,
        stream: str,
        action: Callable[[], None] | None,
        *,
        after: Iterable[Edge] = (),
        awaited: Iterable[Awaitable] = (),
    ) -> HostJob:
        """Queue `action` on `stream`, after the jobs in `after` and the operations in `awaited`.

        Raises:
            HostWorkError: a job has failed.
        """
        self._raise_failure()
        job = HostJob(operation, step, stream, action, [*self.named(after), *awaited])
        if operation:
            self._current[operation] = job
            self._named.append(job)
        self._last[stream] = job
        self._queues[stream].put(job)
        if stream not in self._threads:
            thread = threading.Thread(
                target=self._serve, args=(self._queues[stream],), name=stream, daemon=True
            )
            self._threads[stream] = thread
            thread.start()
        return job

    def _serve(self, queue: "SimpleQueue[HostJob | None]") -> None:
        failed: HostWorkError | None = None
        with torch.no_grad():
            while (job := queue.get()) is not None:
                failed = job.run(failed or (self._failed[0] if self._failed else None))
                if failed is not None:
                    self._failed.append(failed)

    def named(self, edges: Iterable[Edge]) -> list[HostJob]:
        """Return the jobs in `edges` that have not finished successfully."""
        found: list[HostJob] = []
        for edge in edges:
            if isinstance(edge, Previous):
                job = self._previous.get(edge.operation)
            else:
                job = self._current.get(edge)
            if job is not None and not (job.is_over() and job.error is None):
                found.append(job)
        return found

    def last(self, stream: str) -> list[HostJob]:
        """Return the last job of `stream`, if it had any."""
        return [self._last[stream]] if stream in self._last else []

    def wait(self, jobs: Iterable[Awaitable]) -> None:
        """Block the host until the jobs are done.

        Raises:
            HostWorkError: a job has failed.
        """
        for job in jobs:
            if isinstance(job, HostJob) and not job.is_over():
                note(f"waiting for {job.where}")
            job.wait()
        self._raise_failure()

    def drain(self) -> None:
        """Block the host until every job is done."""
        self.wait(list(self._last.values()))

    def end_step(self) -> None:
        """Make the jobs of this step the targets of `Previous` edges; they keep running."""
        self._previous.update(self._current)
        self._current.clear()

    def events(self, origin: int) -> Iterator[Event]:
        """Yield the events of operations, in picoseconds since `origin`; call after `drain`."""
        for job in self._named:
            yield Event(
                operation=job.operation,
                step=job.step,
                stream=job.stream,
                start_ps=(job.start_ns - origin) * PS_PER_NS,
                end_ps=(job.end_ns - origin) * PS_PER_NS,
            )

    def forget(self) -> None:
        """Forget finished jobs, so that `events` no longer yields them."""
        self._named = [job for job in self._named if not job.is_over()]

    def close(self) -> None:
        """End the threads; queued jobs are not run."""
        if self._threads and any(not job.is_over() for job in self._last.values()):
            self._failed.append(HostWorkError("the run has ended"))
        for queue in self._queues.values():
            queue.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads.clear()

    def _raise_failure(self) -> None:
        if self._failed:
            raise self._failed[0]


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
