"""Memory that a schedule takes, known before it runs: its ledger, served by the allocator.

Where frees are deferred it depends on time when memory comes back, and only a run says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from zsim.analysis.schedule_plan import model_state_bytes, model_states
from zsim.analysis.summary import summary
from zsim.analysis.tier_fit import ServedBook, TierUse, tier_uses
from zsim.backend.backend import Job
from zsim.memory import (
    AtOnce,
    book,
    capacity_bytes,
    communicators,
    deferred_frees,
    kept_bytes,
    peak,
    peak_bytes,
    reservations,
    witness,
)
from zsim.schedule.operation import Free, FreeMode
from zsim.schedule.schedule import Kind, Place, Program, Schedule
from zsim.trace.trace import Shortage, Trace


class DependsOnTimeError(ValueError):
    """Frees of the schedule are deferred: what it takes depends on when their uses end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """The moment at which there was no memory, and what was alive then.

    Attributes:
        operation: id of the operation that asked; empty where no moment counts.
        needed_bytes: what would have been reserved.
        capacity_bytes: what there is.
        alive_bytes: of each kind, with what was asked for; the largest first.
        largest_buffer, largest_buffer_bytes: the largest buffer of the first of these kinds.
    """

    operation: str
    needed_bytes: int
    capacity_bytes: int
    alive_bytes: tuple[tuple[Kind, int], ...]
    largest_buffer: str
    largest_buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Device memory of the rank that takes most.

    Attributes:
        allocated_bytes: largest book.
        needed_bytes: the least that it holds at its peak, however long its host waits.
        reserved_bytes: the most that the allocator takes; after a lack it takes no more.
        usable_bytes: what there is for it; 0 if that is not known.
        kept_bytes: the most that is alive beside buffers of collectives, deferred frees returned at
            once, or less.
        lack: the first rank's and pool's that does not suffice, host memory among them.
        tiers: host memory and NVMe of the node that takes most, where ranks hold some.
    """

    allocated_bytes: int
    needed_bytes: int
    reserved_bytes: int
    usable_bytes: int
    lack: Lack | None
    tiers: tuple[TierUse, ...] = ()
    kept_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """Return the bytes of device memory that a GPU must have, by which a fit is judged."""
        return max(self.needed_bytes, self.reserved_bytes)

    @property
    def tier_short(self) -> TierUse | None:
        """Return the first tier of which a node has too little."""
        return next((each for each in self.tiers if not each.fits), None)

    @property
    def fits(self) -> bool:
        """True if every rank goes on, waits for memory included, and no node lacks a tier."""
        return self.lack is None and self.tier_short is None


def footprint(job: Job) -> Footprint:
    """Return the footprint of `job`, without running it.

    Raises:
        DependsOnTimeError: only a run can say.
    """
    if depends_on_time(job.schedule):
        raise DependsOnTimeError("frees are deferred: memory depends on when their uses end")
    return _footprint(job, _served(job))


def certain_footprint(job: Job) -> Footprint | None:
    """Return a footprint that says whether `job` fits; None where only a run can say.

    It is a bound: where the job lacks memory even if deferred frees return at once, what it then
    holds; where it fits, what it reserves if they return as late as they may, and no host waits.
    """
    lacking = certain_lack(job)
    if lacking is not None or not depends_on_time(job.schedule):
        return lacking or footprint(job)
    served = _served(job)
    found = _footprint(job, served)
    waits = any(each.waits for _, made in served.values() for each in made)
    return found if found.fits and not waits else None


def certain_lack(job: Job) -> Footprint | None:
    """Return what a rank holds that lacks memory however it is served; None where none does.

    Deferred frees return at once, and no allocator reserves more than what is held.
    """
    schedule = job.schedule
    for program in schedule.programs:
        latest = book(program, job.steps)
        for pool in schedule.pools:
            usable = capacity_bytes(pool, schedule, program, job.cluster)
            if pool.place is not Place.DEVICE or usable is None:
                continue
            if peak_bytes(latest, pool.name) <= usable:  # at once it is no more
                continue
            entries = latest
            if program.defers:
                entries = book(program, job.steps, returns=AtOnce())
            least = peak_bytes(entries, pool.name)
            if least > usable:
                moment = witness(entries, pool.name, usable)
                shortage = Shortage(
                    operation=moment.operation, needed_bytes=moment.bytes, alive=moment.alive
                )
                return Footprint(
                    allocated_bytes=least,
                    needed_bytes=least,
                    reserved_bytes=usable,
                    usable_bytes=usable,
                    lack=lack(program, shortage, usable),
                    kept_bytes=kept_bytes(entries, pool.name),
                )
    return None


def most_kept_bytes(job: Job) -> int:
    """Return the most that a rank has alive at once beside buffers of collectives.

    Deferred frees return at once. Knobs that gather sooner, or free later, change nothing of it.
    """
    device = [pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE]
    most = 0
    for program in job.schedule.programs:
        entries = book(program, job.steps, returns=AtOnce() if program.defers else None)
        most = max(most, *(kept_bytes(entries, name) for name in device))
    return most


def _served(job: Job) -> dict[str, ServedBook]:
    """Return the book of each role, and what it reserves: deferred frees return at the latest."""
    schedule = job.schedule
    served: dict[str, ServedBook] = {}
    for program in schedule.programs:
        entries = book(program, job.steps)
        late = deferred_frees(program, entries, job.steps)
        found = reservations(schedule, program, entries, job.cluster, deferred=late)
        served[program.role] = entries, found
    return served


def _footprint(job: Job, served: Mapping[str, ServedBook]) -> Footprint:
    schedule = job.schedule
    device = [pool.name for pool in schedule.pools if pool.place is Place.DEVICE]
    allocated = needed = reserved = usable = 0
    found: Lack | None = None
    for program in schedule.programs:
        entries, made = served[program.role]
        allocated = max(allocated, *(peak(entries, name).bytes for name in device))
        for each in made:
            if each.pool in device and each.peak_bytes >= reserved:
                reserved, usable = each.peak_bytes, each.capacity_bytes or 0
            if each.pool in device:
                needed = max(needed, each.needed_bytes)
            if each.shortage is None or each.capacity_bytes is None or found is not None:
                continue
            found = lack(program, each.shortage, each.capacity_bytes)
    return Footprint(
        allocated_bytes=allocated,
        needed_bytes=needed,
        reserved_bytes=reserved,
        usable_bytes=usable,
        lack=found,
        tiers=tier_uses(job, served),
        kept_bytes=most_kept_bytes(job),
    )


def footprint_of_run(job: Job, trace: Trace) -> Footprint:
    """Return the footprint that a run of `job` had."""
    found = summary(job, trace)
    return Footprint(
        allocated_bytes=found.peak_allocated_bytes,
        needed_bytes=found.needed_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        usable_bytes=found.usable_bytes,
        lack=lack_of_run(job.schedule, trace),
        tiers=found.tiers,
        kept_bytes=most_kept_bytes(job),
    )


def lack_of_run(schedule: Schedule, trace: Trace) -> Lack | None:
    """Return what a run of `schedule` lacked; None if it had all."""
    full = trace.out_of_memory
    if full is None:
        return None
    shortage = Shortage(operation=full.operation, needed_bytes=full.needed_bytes, alive=full.alive)
    return lack(schedule.program_of(full.rank), shortage, full.capacity_bytes)


def communicator_count(job: Job) -> int:
    """Return of how many communicators the first rank is a member."""
    return communicators(job.schedule, job.schedule.programs[0])


def states_alone(job: Job) -> Footprint:
    """Return what model states take, and nothing else, of memory as its vendor prints it.

    That is how Rajbhandari et al. 2020 (Table 2) count the theoretical size of a model.
    """
    program = max(job.schedule.programs, key=partial(model_state_bytes, job.schedule))
    states = {buffer.name: buffer.size_bytes for buffer in model_states(job.schedule, program)}
    total, capacity_bytes = sum(states.values()), job.cluster.gpu.memory_bytes
    all_of_it = Shortage(operation="", needed_bytes=total, alive=tuple(states.items()))
    return Footprint(
        allocated_bytes=total,
        needed_bytes=total,
        reserved_bytes=total,
        usable_bytes=capacity_bytes,
        lack=lack(program, all_of_it, capacity_bytes) if total > capacity_bytes else None,
    )


def depends_on_time(schedule: Schedule) -> bool:
    """Tell whether some free is deferred."""
    return any(
        isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED
        for program in schedule.programs
        for operation in program.by_id.values()
    )


def lack(program: Program, shortage: Shortage, capacity_bytes: int) -> Lack:
    """Return what `shortage` says of a rank that runs `program`, by kind."""
    buffers = program.by_name
    kinds: dict[Kind, int] = {}
    for name, size in shortage.alive:
        kinds[buffers[name].kind] = kinds.get(buffers[name].kind, 0) + size
    by_kind = tuple(sorted(kinds.items(), key=lambda each: -each[1]))
    of_first = [each for each in shortage.alive if buffers[each[0]].kind is by_kind[0][0]]
    name, size = max(of_first, key=lambda each: each[1])
    return Lack(
        operation=shortage.operation,
        needed_bytes=shortage.needed_bytes,
        capacity_bytes=capacity_bytes,
        alive_bytes=by_kind,
        largest_buffer=name,
        largest_buffer_bytes=size,
    )
