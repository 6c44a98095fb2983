"""Compare the host memory and NVMe space that the ranks of a node need with the node's capacity.

The memory ledger of a rank gives its use of each pool. The peaks of all ranks of a node add up, and
set-up may hold another copy of the model (`zsim.memory.host_setup`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zsim.backend.backend import Job
from zsim.dtype import DType
from zsim.memory import (
    PAGEABLE,
    is_pinned,
    node_bytes,
    peak_bytes,
    reservations,
    witness,
)
from zsim.memory.host_setup import HostSetup, built_bytes
from zsim.memory.ledger import memory_ledger
from zsim.schedule.issue_order import SETUP
from zsim.schedule.schedule import Kind, Place, Pool, Program
from zsim.trace.trace import LedgerEntry, Reservation, Trace
from zsim.units import format_bytes

MODEL_BUILT = "the model as it is built"
"""A consumer of memory that is not a kind of buffer."""

ServedLedger = tuple[tuple[LedgerEntry, ...], Sequence[Reservation]]
"""The memory ledger of the ranks of a role, and the reservations of their pools."""

SHOWN = 2
"""Number of consumers that a line names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """Memory of one tier on the node that uses the most of it.

    Attributes:
        tier: place of the pools.
        pinned: True for the pinned part of host memory, which has a separate limit.
        needed_bytes: bytes that all ranks of the node reserve, including set-up.
        capacity_bytes: capacity of the node; None if unknown.
        consumers: kinds of buffers or other consumers with their bytes, largest first.
        largest_buffer, largest_buffer_bytes: the largest buffer of one rank at its peak.
        rounded_bytes: pinned bytes beyond the requested ones: rounded sizes and cached blocks.
    """

    tier: Place
    needed_bytes: int
    consumers: tuple[tuple[str, int], ...]
    capacity_bytes: int | None = None
    pinned: bool = False
    largest_buffer: str = ""
    largest_buffer_bytes: int = 0
    rounded_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Return True if the capacity suffices or is unknown."""
        return self.capacity_bytes is None or self.needed_bytes <= self.capacity_bytes

    @property
    def is_noticed(self) -> bool:
        """Return True unless it fits and holds only numbers that the host reads, such as counts."""
        return not self.fits or any(name != Kind.WORKSPACE for name, _ in self.consumers)

    @property
    def name(self) -> str:
        """Return the printed name of the tier."""
        return f"pinned {self.tier} memory" if self.pinned else f"{self.tier} memory"

    def text(self) -> str:
        """Return need and capacity as text, with the largest consumers if the tier does not fit."""
        of = "" if self.capacity_bytes is None else f" of {format_bytes(self.capacity_bytes)}"
        said = f"{format_bytes(self.needed_bytes)} on a node{of}"
        if self.fits:
            return said
        most = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.consumers[:SHOWN])
        largest = ""
        if self.largest_buffer:
            size = format_bytes(self.largest_buffer_bytes)
            largest = f" (largest on a rank: {self.largest_buffer} {size})"
        rounded = ""
        if self.rounded_bytes:
            size = format_bytes(self.rounded_bytes)
            rounded = f"; {size} is pinned memory rounded up to powers of two, as PyTorch does"
        return f"{said}, does not fit: most is {most}{largest}{rounded}"


def tier_uses(job: Job, served: Mapping[str, ServedLedger]) -> tuple[TierUse, ...]:
    """Return the use of every tier that the ranks use; `served` maps roles to ledgers.

    A limit on pinned memory counts as a separate tier.
    """
    found: list[TierUse] = []
    tiers = _Tiers(job, served)
    host, builds = job.cluster.host, job.setup is not HostSetup.SHARDED
    places = dict.fromkeys(pool.place for pool in job.schedule.pools)
    for place in places:
        if place is Place.DEVICE:
            continue
        pools = [pool for pool in job.schedule.pools if pool.place is place]
        found.append(tiers.largest(place, pools, builds=builds and place is Place.HOST))
        limited = [pool for pool in pools if is_pinned(pool)]
        if host is not None and host.pinned_bytes is not None and limited:
            found.append(tiers.largest(place, limited, pinned=True))
    if builds and Place.HOST not in places:
        found.append(tiers.largest(Place.HOST, [], builds=True))
    return tuple(each for each in found if each.needed_bytes)


def tier_uses_of_run(job: Job, trace: Trace) -> tuple[TierUse, ...]:
    """Return the tier uses of a run of `job`; the first rank of each role represents the role."""
    served: dict[str, ServedLedger] = {program.role: ((), ()) for program in job.schedule.programs}
    if any(pool.place is not Place.DEVICE for pool in job.schedule.pools):
        for rank in reversed(trace.ranks):
            program = next(each for each in job.schedule.programs if each.role == rank.role)
            reserved = rank.reservations or reservations(
                job.schedule, program, rank.book, job.cluster
            )
            served[rank.role] = rank.book, reserved
    return tier_uses(job, served)


class _Tiers:
    """Compute the use of tiers on the nodes of a job."""

    def __init__(self, job: Job, served: Mapping[str, ServedLedger]) -> None:
        self._job = job
        self._served = served
        self._programs = {program.role: program for program in job.schedule.programs}
        self._nodes = list(self._kinds_of_nodes())

    def _kinds_of_nodes(self) -> Iterator[dict[str, int]]:
        """Yield the number of ranks of each role on a node, once for each distinct node."""
        schedule, per_node = self._job.schedule, self._job.cluster.gpus_per_node
        size = schedule.mesh.size
        if len(schedule.programs) == 1:
            yield {schedule.programs[0].role: min(per_node, size)}
            return
        seen: set[frozenset[tuple[str, int]]] = set()
        for first in range(0, size, per_node):
            ranks = range(first, min(first + per_node, size))
            roles = Counter(schedule.program_of(rank).role for rank in ranks)
            if (key := frozenset(roles.items())) not in seen:
                seen.add(key)
                yield roles

    def largest(
        self, tier: Place, pools: Sequence[Pool], *, pinned: bool = False, builds: bool = False
    ) -> TierUse:
        """Return the use of `pools` on the node that needs most; `builds` includes set-up."""
        uses = [self._use(tier, pools, roles, builds=builds) for roles in self._nodes]
        most = max(uses, key=lambda each: each.needed_bytes)
        whole = Pool(name=PAGEABLE, place=tier)
        capacity = node_bytes(pools[0] if pinned else whole, self._job.cluster)
        return replace(most, pinned=pinned, capacity_bytes=capacity)

    def _use(
        self, tier: Place, pools: Sequence[Pool], roles: Mapping[str, int], *, builds: bool
    ) -> TierUse:
        consumers: Counter[str] = Counter()
        needed, rounded, largest = 0, 0, ("", 0)
        for role, count in roles.items():
            entries, made = self._served[role]
            reserved = {each.pool: _reserved(each) for each in made}
            for pool in pools:
                slots = pool.capacity_bytes if pool.slot_bytes is not None else None
                needed += count * (slots or reserved.get(pool.name, 0))
                asked = peak_bytes(entries, pool.name)
                if is_pinned(pool) and slots is None:
                    rounded += count * max(0, reserved.get(pool.name, 0) - asked)
                at = witness(entries, pool.name, asked - 1)
                for kind, size in at.by_kind:
                    consumers[kind] += count * size
                largest = max([largest, *at.alive[:1]], key=lambda each: each[1])
        if builds:
            built = self._built_bytes(sum(roles.values()))
            in_setup = built + sum(
                count * _setup_bytes(self._programs[role], pools) for role, count in roles.items()
            )
            if in_setup > needed:
                needed, consumers[MODEL_BUILT] = in_setup, built
        return TierUse(
            tier=tier,
            needed_bytes=needed,
            consumers=tuple((name, size) for name, size in consumers.most_common() if size),
            largest_buffer=largest[0],
            largest_buffer_bytes=largest[1],
            rounded_bytes=rounded,
        )

    def _built_bytes(self, ranks: int) -> int:
        """Return the bytes of the fp32 model that `ranks` ranks of a node hold while building it.

        Each rank of the tensor axis builds only its part.
        """
        model = self._job.model
        parameters = sum(each.elements for each in model.parameters)
        width, parts = DType.FP32.size_bytes, min(model.tensor, ranks)
        copies = ranks // parts
        return built_bytes(self._job.setup, parts * parameters, size_bytes=width, ranks=copies)


def _reserved(each: Reservation) -> int:
    """Return the peak of a pool in bytes, or the bytes it would have needed if it ran out."""
    return each.peak_bytes if each.shortage is None else each.shortage.needed_bytes


def _setup_bytes(program: Program, pools: Sequence[Pool]) -> int:
    """Return the bytes that set-up leaves allocated in `pools` on a rank."""
    names = {pool.name for pool in pools}
    return sum(
        entry.change_bytes
        for entry in memory_ledger(program, 1)
        if entry.step == SETUP and entry.pool in names
    )


def tier_objects(tiers: Sequence[TierUse]) -> list[dict[str, object]]:
    """Return one object per tier for `--json`."""
    return [
        {
            "tier": each.tier,
            "pinned": each.pinned,
            "fits": each.fits,
            "needed_bytes": each.needed_bytes,
            "capacity_bytes": each.capacity_bytes,
            "consumers": dict(each.consumers),
            "largest_buffer": each.largest_buffer,
            "largest_buffer_bytes": each.largest_buffer_bytes,
            "rounded_bytes": each.rounded_bytes,
        }
        for each in tiers
    ]
