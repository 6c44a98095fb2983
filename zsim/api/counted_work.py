"""Work of a search, counted in operations; the count is the same on every machine."""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from zsim.backend.backend import Job


@dataclass(slots=True)
class CountedWork:
    """Operations of the schedules that were written or simulated.

    A schedule counts each time a setting needs it, even if it is cached.
    """

    operations: int = 0


_COUNTS: ContextVar[CountedWork | None] = ContextVar("counted_work", default=None)


@contextmanager
def counted_work() -> Generator[CountedWork]:
    """Count the work done inside the context."""
    work = CountedWork()
    token = _COUNTS.set(work)
    try:
        yield work
    finally:
        _COUNTS.reset(token)


def count_work(job: Job) -> None:
    """Add the operations of all steps of a run, for one rank of each role."""
    work = _COUNTS.get()
    if work is not None:
        every = sum(len(program.by_id) for program in job.schedule.programs)
        work.operations += every * job.steps
