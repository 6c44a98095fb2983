"""The memory of every role as far as no time says otherwise, and whether hosts may wait for it."""

from dataclasses import dataclass

from zsim.backend.backend import Job
from zsim.memory import book, capacity_bytes, deferred_frees, defers, reservations
from zsim.schedule.schedule import Program
from zsim.trace.trace import BookEntry, Reservation


@dataclass(frozen=True, slots=True)
class WorstCase:
    """The book of a role and what it reserves, deferred frees coming back as late as they may."""

    book: tuple[BookEntry, ...]
    reservations: tuple[Reservation, ...]
    depends_on_time: bool

    @property
    def may_wait(self) -> bool:
        """Return whether a host of the role may wait for memory and then go on.

        Without deferred frees that is known, and a role that runs out of memory does not go on.
        """
        waits = any(each.waits for each in self.reservations)
        fails = any(each.shortage is not None for each in self.reservations)
        return (waits or fails) if self.depends_on_time else waits and not fails


class WorstCases:
    """Worst cases of the roles of one schedule, each kept for the next job that has the same."""

    def __init__(self, overflow_steps: frozenset[int]) -> None:
        self._overflow_steps = overflow_steps
        self._kept: dict[str, tuple[object, WorstCase]] = {}

    def may_wait(self, job: Job) -> bool:
        """Return whether some host may have to wait for memory."""
        programs = job.schedule.programs
        return any(_is_limited(job, each) for each in programs) and any(
            self.of(job, program).may_wait for program in programs
        )

    def of(self, job: Job, program: Program) -> WorstCase:
        """Return the worst case of a role."""
        schedule, cluster = job.schedule, job.cluster
        limits = [capacity_bytes(pool, schedule, program, cluster) for pool in schedule.pools]
        key = (job.steps, *limits)
        kept = self._kept.get(program.role)
        if kept is not None and kept[0] == key:
            return kept[1]
        entries = book(program, job.steps, self._overflow_steps)
        deferring = defers(program)
        late = (
            deferred_frees(program, entries, job.steps, self._overflow_steps) if deferring else ()
        )
        reserved = reservations(schedule, program, entries, cluster, deferred=late)
        made = WorstCase(entries, reserved, deferring)
        self._kept[program.role] = key, made
        return made


def _is_limited(job: Job, program: Program) -> bool:
    """Return whether some pool has a capacity that is known."""
    found = (
        capacity_bytes(pool, job.schedule, program, job.cluster) for pool in job.schedule.pools
    )
    return any(each is not None for each in found)
