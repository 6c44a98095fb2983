"""Predict the peak memory of a schedule before it runs, by replaying its allocations.

If frees are deferred, the time at which memory is returned decides, and only a run measures it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from zsim.analysis.schedule_plan import model_state_bytes, model_states
from zsim.analysis.summary import summary
from zsim.analysis.tier_fit import ServedLedger, TierUse, tier_uses
from zsim.backend.backend import Job
from zsim.memory import (
    AtOnce,
    capacity_bytes,
    communicators,
    deferred_frees,
    kept_bytes,
    memory_ledger,
    peak,
    peak_bytes,
    reservations,
    witness,
)
from zsim.schedule.operation import Free, FreeMode
from zsim.schedule.schedule import Kind, Place, Program, Schedule
from zsim.trace.trace import Shortage, Trace


class DependsOnTimeError(ValueError):
    """Frees of the schedule are deferred, so its memory depends on when their uses end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShortage:
    """The allocation that found too little memory, and the buffers alive at that moment.

    Attributes:
        operation: id of the operation that allocates; empty if all model states are counted.
        needed_bytes: memory that the allocator would have had to reserve.
        capacity_bytes: usable memory.
        alive_bytes: live bytes of each kind, the failed allocation included; the largest first.
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
        allocated_bytes: peak of allocated bytes.
        needed_bytes: lowest possible peak, however long the host waits for frees.
        reserved_bytes: peak of bytes reserved by the allocator, up to the first failed allocation.
        usable_bytes: device memory that the allocator may use; 0 if unknown.
        kept_bytes: at most the peak of live bytes without the buffers of collectives, with deferred
            frees returned at once.
        shortage: the first failed allocation, in device or host memory; None if all succeed.
        tiers: host memory and NVMe of the node that uses most of them; empty if no rank does.
    """

    allocated_bytes: int
    needed_bytes: int
    reserved_bytes: int
    usable_bytes: int
    shortage: MemoryShortage | None
    tiers: tuple[TierUse, ...] = ()
    kept_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """Return the bytes of device memory that a GPU needs for the job to fit."""
        return max(self.needed_bytes, self.reserved_bytes)

    @property
    def tier_short(self) -> TierUse | None:
        """Return the first tier (host memory or NVMe) that is too small, or None."""
        return next((each for each in self.tiers if not each.fits), None)

    @property
    def fits(self) -> bool:
        """True if every allocation succeeds, if need be after a wait, and every tier suffices."""
        return self.shortage is None and self.tier_short is None


def footprint(job: Job) -> Footprint:
    """Return the footprint of `job`, without running it.

    Raises:
        DependsOnTimeError: frees are deferred, so only a run gives the footprint.
    """
    if depends_on_time(job.schedule):
        raise DependsOnTimeError("frees are deferred: memory depends on when their uses end")
    return _footprint(job, served_ledgers(job))


def certain_footprint(
    job: Job, served: Mapping[str, ServedLedger] | None = None
) -> Footprint | None:
    """Return a footprint that decides if `job` fits, or None if only a run can decide.

    `served` are its `served_ledgers`, if they are known. With deferred frees the footprint is a
    bound. A job that does not fit gets the memory it holds if all frees return at once. A job that
    fits gets the memory it reserves if they return as late as possible and no host waits.
    """
    lacking = certain_out_of_memory(job)
    if lacking is not None:
        return lacking
    served = served or served_ledgers(job)
    found = _footprint(job, served)
    if not depends_on_time(job.schedule):
        return found
    waits = any(each.waits for _, made in served.values() for each in made)
    return found if found.fits and not waits else None


def certain_out_of_memory(job: Job) -> Footprint | None:
    """Return the footprint of the first rank that cannot fit in any case, or None.

    This is the best case: deferred frees return at once, and the allocator reserves no more than
    the live bytes.
    """
    schedule = job.schedule
    for program in schedule.programs:
        latest = memory_ledger(program, job.steps)
        for pool in schedule.pools:
            usable = capacity_bytes(pool, schedule, program, job.cluster)
            if pool.place is not Place.DEVICE or usable is None:
                continue
            if peak_bytes(latest, pool.name) <= usable:  # frees at once cannot raise the peak
                continue
            entries = latest
            if program.defers:
                entries = memory_ledger(program, job.steps, returns=AtOnce())
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
                    shortage=shortage_by_kind(program, shortage, usable),
                    kept_bytes=kept_bytes(entries, pool.name),
                )
    return None


def most_kept_bytes(job: Job) -> int:
    """Return the largest peak of live bytes of a rank, without the buffers of collectives.

    Deferred frees return at once. Options that gather earlier or free later do not change it.
    """
    device = [pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE]
    most = 0
    for program in job.schedule.programs:
        entries = memory_ledger(program, job.steps, returns=AtOnce() if program.defers else None)
        most = max(most, *(kept_bytes(entries, name) for name in device))
    return most


def served_ledgers(job: Job) -> dict[str, ServedLedger]:
    """Return the allocations and reservations of each role, with frees as late as possible."""
    schedule = job.schedule
    served: dict[str, ServedLedger] = {}
    for program in schedule.programs:
        entries = memory_ledger(program, job.steps)
        late = deferred_frees(program, entries, job.steps)
        found = reservations(schedule, program, entries, job.cluster, deferred=late)
        served[program.role] = entries, found
    return served


def _footprint(job: Job, served: Mapping[str, ServedLedger]) -> Footprint:
    schedule = job.schedule
    device = [pool.name for pool in schedule.pools if pool.place is Place.DEVICE]
    allocated = needed = reserved = usable = 0
    found: MemoryShortage | None = None
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
            found = shortage_by_kind(program, each.shortage, each.capacity_bytes)
    return Footprint(
        allocated_bytes=allocated,
        needed_bytes=needed,
        reserved_bytes=reserved,
        usable_bytes=usable,
        shortage=found,
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
        shortage=run_shortage(job.schedule, trace),
        tiers=found.tiers,
        kept_bytes=most_kept_bytes(job),
    )


def run_shortage(schedule: Schedule, trace: Trace) -> MemoryShortage | None:
    """Return the allocation at which a run of `schedule` ran out of memory, or None."""
    full = trace.out_of_memory
    if full is None:
        return None
    shortage = Shortage(operation=full.operation, needed_bytes=full.needed_bytes, alive=full.alive)
    return shortage_by_kind(schedule.program_of(full.rank), shortage, full.capacity_bytes)


def communicator_count(job: Job) -> int:
    """Return the number of communicators that the first rank is a member of."""
    return communicators(job.schedule, job.schedule.programs[0])


def states_alone(job: Job) -> Footprint:
    """Return the footprint of the model states alone, against the nominal memory of the GPU.

    Rajbhandari et al. 2020 (Table 2) compute the theoretical maximum model size like this.
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
        shortage=shortage_by_kind(program, all_of_it, capacity_bytes)
        if total > capacity_bytes
        else None,
    )


def depends_on_time(schedule: Schedule) -> bool:
    """Return True if any free of `schedule` is deferred."""
    return any(
        isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED
        for program in schedule.programs
        for operation in program.by_id.values()
    )


def shortage_by_kind(program: Program, shortage: Shortage, capacity_bytes: int) -> MemoryShortage:
    """Return `shortage` of a rank that runs `program`, with live bytes summed by kind."""
    buffers = program.by_name
    kinds: dict[Kind, int] = {}
    for name, size in shortage.alive:
        kinds[buffers[name].kind] = kinds.get(buffers[name].kind, 0) + size
    by_kind = tuple(sorted(kinds.items(), key=lambda each: -each[1]))
    of_first = [each for each in shortage.alive if buffers[each[0]].kind is by_kind[0][0]]
    name, size = max(of_first, key=lambda each: each[1])
    return MemoryShortage(
        operation=shortage.operation,
        needed_bytes=shortage.needed_bytes,
        capacity_bytes=capacity_bytes,
        alive_bytes=by_kind,
        largest_buffer=name,
        largest_buffer_bytes=size,
    )
