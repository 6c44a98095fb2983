"""Memory that a pool reserves from its device, if its allocator serves the ledger of a rank.

Requests come from `zsim.memory.service`. A block with a deferred free waits for its uses until
the ledger returns it, or until memory runs out; the allocator then waits for all uses before it
fails, as in PyTorch.
"""

from itertools import accumulate, takewhile
from weakref import finalize

from zsim.cluster.cluster import Cluster
from zsim.memory.caching import UNLIMITED, CachingAllocator
from zsim.memory.expandable import ExpandableAllocator
from zsim.memory.ledger import AtOnce, memory_ledger
from zsim.memory.peak import peak_bytes, witness
from zsim.memory.pinned import PinnedAllocator
from zsim.memory.quick_caching import QuickAllocator
from zsim.memory.service import Deferred, Service
from zsim.schedule.issue_order import NO_OVERFLOW, issued
from zsim.schedule.operation import Allocate, Free, FreeMode
from zsim.schedule.schedule import Discipline, Place, Pool, Program, Schedule, Scope
from zsim.trace.trace import LedgerEntry, Reservation, Shortage

PAGEABLE = "pageable"
"""Prefix of the names of host memory pools that are not pinned."""


def reservations(
    schedule: Schedule,
    program: Program,
    entries: tuple[LedgerEntry, ...],
    cluster: Cluster,
    *,
    deferred: Deferred = (),
) -> tuple[Reservation, ...]:
    """Return the reservations of each pool of a rank that runs `program` with this ledger."""
    return tuple(
        reserve(
            program,
            entries,
            pool,
            capacity_bytes(pool, schedule, program, cluster),
            deferred=deferred,
        )
        for pool in schedule.pools
    )


def deferred_frees(
    program: Program,
    entries: tuple[LedgerEntry, ...],
    steps: int,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
) -> Deferred:
    """Return the position in the ledger at which the host issues each deferred free."""
    found: list[tuple[int, str]] = []
    line = 0
    for step, operation in issued(program, steps, overflow_steps):
        if type(operation) is Free and operation.mode is FreeMode.DEFERRED:
            found.append((line, operation.buffer))
        elif type(operation) is Allocate or type(operation) is Free:
            while line < len(entries) and (entries[line].operation, entries[line].step) == (
                operation.id,
                step,
            ):
                line += 1
    return tuple(found)


def reserve(
    program: Program,
    entries: tuple[LedgerEntry, ...],
    pool: Pool,
    capacity_bytes: int | None = None,
    *,
    deferred: Deferred = (),
) -> Reservation:
    """Serve the ledger of a rank that runs `program`, on a device of `capacity_bytes`.

    Without `deferred`, a deferred block is freed at its entry in the ledger.
    """
    if pool.discipline is Discipline.EXACT:
        return _exact(program, entries, pool, capacity_bytes)
    service = Service(allocator_of(pool, capacity_bytes), program, pool.name)
    own = [entry for entry in entries if entry.pool == pool.name]
    course = tuple(service.course(entries, deferred))
    shortage: Shortage | None = None
    needed = service.allocated_bytes
    if len(course) < len(own):
        refused = own[len(course)]
        shortage = Shortage(
            operation=refused.operation,
            needed_bytes=service.needed_bytes,
            alive=witness(own[: len(course) + 1], pool.name, UNLIMITED).alive,
        )
        needed = needed_bytes(program, pool)
    return Reservation(
        pool=pool.name,
        capacity_bytes=capacity_bytes,
        course_bytes=course,
        shortage=shortage,
        waits=service.waits,
        needed_bytes=needed,
    )


def needed_bytes(program: Program, pool: Pool) -> int:
    """Return the least peak bytes of a pool that a rank needs, with unlimited host waits.

    This is `torch.cuda.max_memory_allocated` of tensors that no other stream uses. The result is
    cached while `program` is alive, because both the worst case and the simulation need it when
    memory is full.
    """
    key = id(program)
    if key not in _NEEDED:
        finalize(program, _NEEDED.pop, key, None).atexit = False
    known = _NEEDED.setdefault(key, {})
    if pool not in known:
        known[pool] = _needed_bytes(program, pool)
    return known[pool]


_NEEDED: dict[int, dict[Pool, int]] = {}
"""Needed bytes of each pool, by identity of a live program."""


def _needed_bytes(program: Program, pool: Pool) -> int:
    at_once = memory_ledger(program, 2, returns=AtOnce() if program.defers else None)
    if pool.discipline is Discipline.EXACT:
        return peak_bytes(at_once, pool.name)
    service = Service(allocator_of(pool, None), program, pool.name)
    served = len(service.course(at_once))
    # A mistyped exponent can exceed the address space; then use the bytes of the tensors.
    is_whole = served == sum(entry.pool == pool.name for entry in at_once)
    return service.allocated_bytes if is_whole else peak_bytes(at_once, pool.name)


def allocator_of(pool: Pool, capacity_bytes: int | None) -> CachingAllocator | PinnedAllocator:
    """Return the allocator of a pool that is not exact; it keeps no journal."""
    if pool.place is Place.HOST:
        return PinnedAllocator(capacity_bytes=capacity_bytes)
    if pool.discipline is Discipline.EXPANDABLE:
        return ExpandableAllocator(capacity_bytes=capacity_bytes, journals=False)
    return QuickAllocator(capacity_bytes=capacity_bytes)


def handed_out(
    schedule: Schedule, discipline: Discipline, pinned: Discipline = Discipline.EXACT
) -> Schedule:
    """Return `schedule` with other disciplines of device memory and of pinned host memory.

    A pool of slots is allocated once, whole: its slots are not rounded individually.
    """
    ways = {
        pool.name: discipline
        if pool.place is Place.DEVICE
        else (pinned if _is_taken_in_parts(pool) else Discipline.EXACT)
        for pool in schedule.pools
    }
    if all(pool.discipline is ways[pool.name] for pool in schedule.pools):
        return schedule
    return schedule.handed_out(ways)


def _is_taken_in_parts(pool: Pool) -> bool:
    return is_pinned(pool) and pool.slot_bytes is None


def is_pinned(pool: Pool) -> bool:
    """Return True if a pool is pinned host memory: all host memory that is not named pageable."""
    return pool.place is Place.HOST and not pool.name.startswith(PAGEABLE)


def capacity_bytes(
    pool: Pool, schedule: Schedule, program: Program, cluster: Cluster
) -> int | None:
    """Return the bytes of a pool that a rank running `program` may reserve; None if unknown.

    Device memory: the bytes that other users of the GPU leave. Host memory: the memory of the node,
    or its limit of pinned memory. Other pools: all drives. A pool shared by the ranks of a node is
    divided equally.
    """
    found = pool.capacity_bytes
    if found is None and pool.place is Place.DEVICE:
        found = cluster.gpu.usable_bytes(communicators(schedule, program))
    elif found is None:
        found = node_bytes(pool, cluster)
    if found is not None and pool.scope is Scope.NODE:
        found //= min(cluster.gpus_per_node, schedule.mesh.size)
    return found


def node_bytes(pool: Pool, cluster: Cluster) -> int | None:
    """Return the bytes a node has for a pool that is not on a GPU; None if unknown."""
    host, drives = cluster.host, cluster.drives
    if pool.place is not Place.HOST:
        return None if drives is None else drives.total_bytes
    if host is None:
        return None
    pinned = host.pinned_bytes if is_pinned(pool) else None
    return host.memory_bytes if pinned is None else pinned


def communicators(schedule: Schedule, program: Program) -> int:
    """Return the number of communicators of a rank: groups of several ranks in `program`."""
    return sum(schedule.group_by_name[name].size(schedule.mesh) > 1 for name in program.groups)


def _exact(
    program: Program, entries: tuple[LedgerEntry, ...], pool: Pool, capacity_bytes: int | None
) -> Reservation:
    changes = [entry.change_bytes for entry in entries if entry.pool == pool.name]
    course = tuple(accumulate(changes))
    needed = needed_bytes(program, pool) if program.defers else max(course, default=0)
    shortage: Shortage | None = None
    if capacity_bytes is not None and max(course, default=0) > capacity_bytes:
        found = witness(entries, pool.name, capacity_bytes)
        shortage = Shortage(operation=found.operation, needed_bytes=found.bytes, alive=found.alive)
        course = tuple(takewhile(lambda reserved: reserved <= capacity_bytes, course))
    return Reservation(
        pool=pool.name,
        capacity_bytes=capacity_bytes,
        course_bytes=course,
        shortage=shortage,
        needed_bytes=needed,
    )
