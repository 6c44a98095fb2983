"""Records of simulated ranks as traces: events, transfers, the allocator's ledger."""

from collections.abc import Sequence

from zsim.backend.backend import Job
from zsim.memory import Deferred, book, deferred_frees, defers, reservations
from zsim.network.volume import element_count, is_scalar
from zsim.schedule.operation import Allocate, Free, Operation
from zsim.trace.trace import BookEntry, Event, RankTrace, Reservation, Transfer
from zsim_des.engine.host_bound import host_bound_ps
from zsim_des.engine.rank import Rank
from zsim_des.engine.stream import ProgramRun


class Records:
    """Makes traces of the ranks of one run; the first step began at `begin_ps`.

    Ranks of a role issue the same operations, so they share their transfers, and their book unless
    a deferred free makes it depend on time.
    """

    def __init__(self, job: Job, overflow_steps: frozenset[int], begin_ps: int) -> None:
        self._job = job
        self._overflow_steps = overflow_steps
        self._begin_ps = begin_ps
        self._transfers: dict[str, tuple[Transfer, ...]] = {}
        self._books: dict[str, tuple[BookEntry, ...]] = {}
        self._reservations: dict[int, tuple[Reservation, ...]] = {}

    def rank_trace(self, rank: Rank) -> RankTrace:
        """Return the trace of one rank."""
        of = rank.rank_class
        role = of.program.role
        if role not in self._transfers:
            self._transfers[role] = _transfers(rank)
        entries = self._book(rank)
        return RankTrace(
            rank=of.rank,
            role=role,
            stands_for=of.count,
            events=self._events(rank),
            book=entries,
            transfers=self._transfers[role],
            reservations=self._reserved(rank, entries),
            host_bound_ps=host_bound_ps(of.program, rank.instances, self._job.steps),
        )

    def _events(self, rank: Rank) -> tuple[Event, ...]:
        streams, begin_ps = self._job.schedule.streams, self._begin_ps
        return tuple(
            [
                Event(
                    operation=what.name,
                    step=instance.step,
                    stream=streams[what.stream],
                    start_ps=instance.starts[what.slot] - begin_ps,
                    end_ps=instance.ends[what.slot] - begin_ps,
                )
                for instance in rank.instances
                for what in instance.course.issued
                if what.operation is not None
            ]
        )

    def _book(self, rank: Rank) -> tuple[BookEntry, ...]:
        program = rank.rank_class.program
        found = self._books.get(program.role)
        if found is None:
            returns = _TimedBook(rank.instances, rank.program.slots)
            found = book(program, self._job.steps, self._overflow_steps, returns)
            if not defers(program):
                self._books[program.role] = found
        return found

    def _reserved(self, rank: Rank, entries: tuple[BookEntry, ...]) -> tuple[Reservation, ...]:
        """Return what the ledger makes pools reserve: the same for ranks that share it."""
        found = self._reservations.get(id(entries))
        if found is None:
            job, program = self._job, rank.rank_class.program
            deferred: Deferred = ()
            if defers(program):
                deferred = deferred_frees(program, entries, job.steps, self._overflow_steps)
            found = reservations(job.schedule, program, entries, job.cluster, deferred=deferred)
            self._reservations[id(entries)] = found
        return found


def _transfers(rank: Rank) -> tuple[Transfer, ...]:
    return tuple(
        [
            Transfer(
                operation=member.id,
                step=instance.step,
                group=member.group,
                collective=member.name,
                elements=element_count(member),
                bytes=size_bytes,
                scalar=is_scalar(member),
            )
            for instance in rank.instances
            for what in instance.course.issued
            for member, size_bytes in what.members
        ]
    )


class _TimedBook:
    """Deferred frees return at the first allocation that the host issues after the uses ended."""

    def __init__(self, instances: Sequence[ProgramRun], slots: dict[str, int]) -> None:
        self._instances = {instance.step: instance for instance in instances}
        self._slots = slots
        self._now_ps = 0

    def issue(self, step: int, operation: Operation) -> None:
        """Note that the host issues `operation`."""
        if isinstance(operation, Allocate):
            self._now_ps = self._instances[step].noted[operation.id]

    def over(self, step: int, free: Free) -> bool:
        """Return whether every use had ended when the host issued the latest allocation."""
        ends = self._instances[step].ends
        return all(ends[self._slots[use]] <= self._now_ps for use in free.uses)
