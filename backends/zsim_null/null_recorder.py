"""`NullBackend`: record every operation in issue order, at time zero.

This backend is a minimal example of the backend protocol. It moves no bytes, has no clock and
never waits for other ranks, so a schedule that deadlocks on other backends runs here.
"""

from zsim.backend.backend import BackendTraits, Job, RefusedError
from zsim.backend.run_size import too_large
from zsim.memory import memory_ledger
from zsim.network.volume import (
    communications,
    ring_equivalent_bytes,
    transfer,
)
from zsim.schedule.issue_order import issued
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Free,
    HostWait,
    Operation,
    SetScalar,
    StreamOperation,
)
from zsim.schedule.schedule import Program, RankRole, Schedule
from zsim.trace.trace import Event, RankTrace, Trace, Transfer


class NullBackend:
    """Records one rank of each role; in branches, the tested value is zero."""

    name = "null"
    traits = BackendTraits()

    def refusal(self, job: Job) -> str | None:
        """Return why `job` exceeds the size limits, or None if it can be recorded."""
        return too_large(job)

    def run(self, job: Job, *, seed: int) -> Trace:
        """Record setup and all steps; all times in the trace are 0.

        Raises:
            RefusedError: the job exceeds the size limits.
        """
        reason = self.refusal(job)
        if reason is not None:
            raise RefusedError(reason)
        schedule = job.schedule
        by_role = {program.role: program for program in schedule.programs}
        return Trace(
            backend=self.name,
            schedule=schedule.name,
            seed=seed,
            steps=job.steps,
            ranks=tuple(
                _record(schedule, role, by_role[role.name], job.steps) for role in schedule.roles
            ),
            step_end_ps=(0,) * job.steps,
            error_text="no times: the null backend records and takes no time",
        )


def _record(schedule: Schedule, role: RankRole, program: Program, steps: int) -> RankTrace:
    events: list[Event] = []
    transfers: list[Transfer] = []
    for step, operation in issued(program, steps):
        queued = _on_stream(operation)
        if queued is not None:
            events.append(
                Event(operation=operation.id, step=step, stream=queued.stream, start_ps=0, end_ps=0)
            )
        transfers += [_transfer(schedule, step, member) for member in communications(operation)]
    return RankTrace(
        rank=next(rank for rank in range(schedule.mesh.size) if schedule.role_of(rank) == role),
        role=role.name,
        stands_for=role.size(schedule.mesh),
        events=tuple(events),
        book=memory_ledger(program, steps),
        transfers=tuple(transfers),
    )


def _on_stream(operation: Operation) -> StreamOperation | None:
    if isinstance(operation, Allocate | Free | HostWait | SetScalar | Branch):
        return None
    return operation


def _transfer(schedule: Schedule, step: int, member: Communication) -> Transfer:
    count = schedule.group_by_name[member.group].size(schedule.mesh)
    return transfer(member, step, ring_equivalent_bytes(member, count))
