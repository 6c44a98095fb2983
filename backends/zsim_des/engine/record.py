"""Records of simulated ranks as traces: events, transfers, the allocator's ledger."""

from collections.abc import Sequence

from zsim.backend.backend import Job
from zsim.memory import deferred_frees, memory_ledger, reservations
from zsim.network.volume import transfer
from zsim.schedule.issue_order import SETUP
from zsim.schedule.operation import Allocate, Compute, Free, Operation
from zsim.trace.trace import Event, LedgerEntry, RankTrace, Reservation, Transfer
from zsim_des.engine.host_bound import host_bound_ps
from zsim_des.engine.instruction import Enqueue
from zsim_des.engine.rank import Rank
from zsim_des.engine.stream import ProgramRun
from zsim_des.engine.worst_case import WorstCases


class Records:
    """Makes traces of the ranks of one run; the first step began at `begin_ps`.

    Ranks of a role issue the same operations, so they share their transfers. They also share their
    memory ledger, taken from `worst_cases`, unless it depends on time.
    """

    def __init__(
        self, job: Job, overflow_steps: frozenset[int], begin_ps: int, worst_cases: WorstCases
    ) -> None:
        self._job = job
        self._overflow_steps = overflow_steps
        self._begin_ps = begin_ps
        self._worst_cases = worst_cases
        self._transfers: dict[str, tuple[Transfer, ...]] = {}

    def rank_trace(self, rank: Rank) -> RankTrace:
        """Return the trace of one rank."""
        of = rank.rank_class
        role = of.program.role
        if role not in self._transfers:
            self._transfers[role] = _transfers(rank)
        entries, reservations_made = self._memory(rank)
        return RankTrace(
            rank=of.rank,
            role=role,
            stands_for=of.count,
            events=self._events(rank),
            book=entries,
            transfers=self._transfers[role],
            reservations=reservations_made,
            host_bound_ps=host_bound_ps(of.program, rank.instances, self._job.steps),
            memory_wait_ps=_memory_wait_ps(rank),
        )

    def _events(self, rank: Rank) -> tuple[Event, ...]:
        begin_ps = self._begin_ps
        return tuple(
            [
                Event(
                    operation=what.name,
                    step=instance.step,
                    stream=what.operation.stream,
                    start_ps=(
                        _start_ps(instance, what) if what.parts else instance.starts[what.slot]
                    )
                    - begin_ps,
                    end_ps=instance.ends[what.slot] - begin_ps,
                )
                for instance in rank.instances
                for what in instance.course.issued
                if what.operation is not None and not what.is_part
            ]
        )

    def _memory(self, rank: Rank) -> tuple[tuple[LedgerEntry, ...], tuple[Reservation, ...]]:
        """Return the memory ledger of a rank and the reservations of its pools."""
        if rank.memory is not None:
            return rank.memory.ledger(), rank.memory.reservations()
        job, program = self._job, rank.rank_class.program
        if not program.defers:
            known = self._worst_cases.of(job, program)
            return known.ledger, known.reservations
        returns = _TimedReturns(rank.instances, rank.program.slots)
        found = memory_ledger(program, job.steps, self._overflow_steps, returns)
        late = deferred_frees(program, found, job.steps, self._overflow_steps)
        return found, reservations(job.schedule, program, found, job.cluster, deferred=late)


def _start_ps(instance: ProgramRun, what: Enqueue) -> int:
    """Return when an operation of several entries starts.

    A `Compute` pauses between entries while it waits for copies. That time belongs to the copies,
    so the operation is shown without its pauses, ending at its last entry.
    """
    first = instance.starts[what.parts[0]]
    if not isinstance(what.operation, Compute):
        return first
    slots = (*what.parts, what.slot)
    taken_ps = sum(instance.ends[slot] - instance.starts[slot] for slot in slots)
    return instance.ends[what.slot] - taken_ps


def _memory_wait_ps(rank: Rank) -> tuple[int, ...]:
    """Return by step how long the host waited for memory; empty if it never did."""
    found = [each.memory_wait_ps for each in rank.instances if each.step != SETUP]
    return tuple(found) if any(found) else ()


def _transfers(rank: Rank) -> tuple[Transfer, ...]:
    return tuple(
        [
            transfer(member, instance.step, size_bytes)
            for instance in rank.instances
            for what in instance.course.issued
            for member, size_bytes in what.members
        ]
    )


class _TimedReturns:
    """Returns deferred memory at the first allocation issued after its uses ended."""

    def __init__(self, instances: Sequence[ProgramRun], slots: dict[str, int]) -> None:
        self._instances = {instance.step: instance for instance in instances}
        self._slots = slots
        self.now = 0

    def issue(self, step: int, operation: Operation) -> None:
        """Note that the host issues `operation`; the clock moves to the latest allocation."""
        if isinstance(operation, Allocate):
            self.now = self._instances[step].noted[operation.id]

    def over_at(self, step: int, free: Free) -> int:
        """Return when the last of the uses ended."""
        ends = self._instances[step].ends
        return max((ends[self._slots[use]] for use in free.uses), default=0)
