"""Traces of runs: the same type from every backend.

Times are integer picoseconds since the start of the first step. A trace of a folded simulation
holds one rank of each class of equivalent ranks, and the number of ranks that it represents.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from msgspec import Struct

from zsim.schedule.schedule import Kind
from zsim.trace.witness import Witness

Interval = tuple[int, int]
"""Start and end, in picoseconds."""


def within(interval: Interval, step: Interval, *, is_late: bool = False) -> Iterator[Interval]:
    """Yield the parts of an interval in a step.

    With late updates, consecutive steps overlap. The part of an interval before the step is then
    shifted by one step, to where the next step's early part would be.
    """
    (start, end), (begin, stop) = interval, step
    if end > begin and start < stop:
        yield max(start, begin), min(end, stop)
    if is_late and start < begin:
        yield start + stop - begin, min(end, begin) + stop - begin


class Event(Struct, frozen=True, kw_only=True, gc=False):
    """One operation on one rank, with its start and end. `step` is -1 in setup."""

    operation: str
    step: int
    stream: str
    start_ps: int
    end_ps: int


class LedgerEntry(Struct, frozen=True, kw_only=True, gc=False):
    """One line of the memory ledger, in the order in which the host issued it.

    `change_bytes` is positive for an allocation. `operation` is the `Allocate`, the `Free`, or for
    a deferred free the `Allocate` at which the memory was returned.
    """

    operation: str
    step: int
    pool: str
    buffer: str
    kind: Kind
    change_bytes: int


class Transfer(Struct, frozen=True, kw_only=True, gc=False):
    """One collective passed to the communicator, in issue order.

    `bytes` are ring-equivalent: the bytes that this rank sends with the ring algorithm.
    """

    operation: str
    step: int
    group: str
    collective: str
    elements: int
    bytes: int
    scalar: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """An allocation that failed: the memory it needed, and the buffers alive at that time."""

    operation: str
    needed_bytes: int
    alive: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory that one pool reserves on its device and keeps, by the ledger of a rank.

    Attributes:
        pool: the pool.
        capacity_bytes: the maximum it may reserve; None if that is not known.
        course_bytes: reserved bytes after each line of the ledger for this pool. The part beyond
            the allocated bytes is rounded up, split off, or cached. It ends at a shortage.
        shortage: the first line for which there was no memory.
        needed_bytes: the minimum that the rank holds at its peak, however long its host waits.
        waits: number of times the host waited until memory was returned. A run that ignores these
            waits is too fast.
    """

    pool: str
    capacity_bytes: int | None
    course_bytes: tuple[int, ...]
    shortage: Shortage | None = None
    needed_bytes: int = 0
    waits: int = 0

    @property
    def peak_bytes(self) -> int:
        """The maximum that the pool reserves at a time."""
        return max(self.course_bytes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The trace of one rank; it represents `stands_for` ranks with equal traces.

    `reservations` exist if the backend simulates memory. `host_bound_ps` has for each step how long
    the stream of its Computes waited for a host that was still issuing; it exists if the backend
    simulates host costs. `memory_wait_ps` has for each step how long its host waited for memory;
    empty if it never did. `witness` exists if the run was observed. `rows` has the rows that real
    experts received: step, micro-batch, layer, expert group, source, expert and number.
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"rows"})

    rank: int
    role: str
    stands_for: int
    events: tuple[Event, ...]
    book: tuple[LedgerEntry, ...]
    transfers: tuple[Transfer, ...]
    losses: tuple[float, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    host_bound_ps: tuple[int, ...] = ()
    memory_wait_ps: tuple[int, ...] = ()
    witness: Witness | None = None
    rows: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Bytes that crossed one class of links in one step, summed over the links of the class."""

    link: str
    count: int
    bytes: int
    capacity_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A pool whose capacity was exceeded: rank and operation, and alive buffers, largest first."""

    rank: int
    pool: str
    operation: str
    needed_bytes: int
    capacity_bytes: int
    alive: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """Error of a predicted step time.

    90 % of comparable runs take between `low` and `high` times the prediction. `features` has the
    features of the run as JSON; the error of a ratio of two step times depends on them.
    """

    low: float
    high: float
    features: str

    @classmethod
    def of(cls, bounds: tuple[float, float] | None, features: str) -> "StepError | None":
        """Return the error with these bounds; None without bounds."""
        return None if bounds is None else cls(low=bounds[0], high=bounds[1], features=features)

    @property
    def half_width(self) -> float:
        """Half the distance of the bounds, as a share of the prediction."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A run of setup and `steps` steps.

    `step_end_ps` has the end of each step, when all streams of all ranks have finished it.
    `observed` holds figures by name that only some backends can measure (live storages by class,
    for one). `error` is the error of the step time; None if it is unknown or times were
    measured. `error_text` describes it in one line.
    """

    backend: str
    schedule: str
    seed: int
    steps: int
    ranks: tuple[RankTrace, ...]
    step_end_ps: tuple[int, ...]
    links: tuple[LinkUse, ...] = ()
    out_of_memory: OutOfMemory | None = None
    error_text: str = ""
    error: StepError | None = None
    observed: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("ranks: none; a trace has at least one")
        if self.steps < 1:
            raise ValueError(f"steps: {self.steps} must be at least 1")
        if len(self.step_end_ps) != self.steps:
            raise ValueError(f"step_end_ps: {len(self.step_end_ps)}, must be {self.steps}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """Intervals of the last step in which one rank computed, and communicated on each group.

    `on_host` has the intervals of work on the host side of its node, by name. `host_bound_ps` is
    how long it waited for its host, `memory_wait_ps` how long the host waited for memory: as in
    `RankTrace`.
    """

    computing: Sequence[Interval]
    by_group: Mapping[str, Sequence[Interval]]
    on_host: Mapping[str, Sequence[Interval]] = field(default_factory=dict[str, Sequence[Interval]])
    host_bound_ps: int = 0
    memory_wait_ps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """Times of the last step of a trace, and nothing else.

    `ranks` has one rank of each simulated class; intervals are cut to the step. `error_text` and
    `error` are taken from the trace.
    """

    begin_ps: int
    end_ps: int
    ranks: tuple[RankStep, ...]
    error_text: str
    error: StepError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeriodicStep:
    """Times of a step of a pipeline, and of one period of its steady state.

    `period` repeats once for each further turn of micro-batches, unchanged on all ranks.
    """

    step: LastStep
    period: LastStep

    @property
    def period_ps(self) -> int:
        """Return the duration of the period."""
        return self.period.end_ps - self.period.begin_ps

    def with_periods(self, times: int) -> int:
        """Return the duration of the step with the period `times` more."""
        return self.step.end_ps - self.step.begin_ps + times * self.period_ps
