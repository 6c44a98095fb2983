"""Memory of every role without timing: latest return of deferred frees, and possible waits."""

from dataclasses import dataclass

from zsim.backend.backend import Job
from zsim.memory import (
    Deferred,
    capacity_bytes,
    deferred_frees,
    memory_ledger,
    reservations,
)
from zsim.schedule.schedule import Program
from zsim.trace.trace import LedgerEntry, Reservation


@dataclass(frozen=True, slots=True)
class RoleWorstCase:
    """The memory ledger and reservations of a role if deferred frees return as late as possible."""

    ledger: tuple[LedgerEntry, ...]
    reservations: tuple[Reservation, ...]
    depends_on_time: bool

    @property
    def may_wait(self) -> bool:
        """Return True if a host of the role may wait for memory and then continue.

        Without deferred frees the ledger is exact, and a role that runs out of memory stops.
        """
        waits = any(each.waits for each in self.reservations)
        fails = any(each.shortage is not None for each in self.reservations)
        return (waits or fails) if self.depends_on_time else waits and not fails


class WorstCases:
    """Worst cases of the roles of one schedule, kept while the memory of the job is the same."""

    def __init__(self, overflow_steps: frozenset[int]) -> None:
        self._overflow_steps = overflow_steps
        self._key: object = None
        self._kept: dict[str, RoleWorstCase] = {}
        self._may_wait: bool | None = None

    def may_wait(self, job: Job) -> bool:
        """Return True if some host may have to wait for memory."""
        self._keep(job)
        if self._may_wait is None:
            self._may_wait = _is_limited(job) and any(
                self.of(job, program).may_wait for program in job.schedule.programs
            )
        return self._may_wait

    def of(self, job: Job, program: Program) -> RoleWorstCase:
        """Return the worst case of a role."""
        self._keep(job)
        found = self._kept.get(program.role)
        if found is None:
            found = self._kept[program.role] = self._made(job, program)
        return found

    def _keep(self, job: Job) -> None:
        """Drop the results kept for jobs with other memory."""
        cluster = job.cluster
        key = (job.steps, cluster.gpu, cluster.host, cluster.gpus_per_node)
        if key != self._key:
            self._key, self._may_wait = key, None
            self._kept.clear()

    def _made(self, job: Job, program: Program) -> RoleWorstCase:
        entries = memory_ledger(program, job.steps, self._overflow_steps)
        is_late = program.defers
        late: Deferred = ()
        if is_late:
            late = deferred_frees(program, entries, job.steps, self._overflow_steps)
        reserved = reservations(job.schedule, program, entries, job.cluster, deferred=late)
        return RoleWorstCase(entries, reserved, is_late)


def _is_limited(job: Job) -> bool:
    """Return True if the capacity of some pool is known."""
    return any(
        capacity_bytes(pool, job.schedule, program, job.cluster) is not None
        for program in job.schedule.programs
        for pool in job.schedule.pools
    )
