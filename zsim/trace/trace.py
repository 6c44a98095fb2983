"""Traces of runs: the same type from every backend.

Times are integer picoseconds since the start of the first step. A trace of a folded simulation
holds one rank of each class of ranks that no one can tell apart, and says how many it stands for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from zsim.schedule.quick_init import quick_init
from zsim.schedule.schedule import Kind
from zsim.trace.witness import Witness

Interval = tuple[int, int]


def within(interval: Interval, step: Interval, *, is_late: bool = False) -> Iterator[Interval]:
    """Yield what of an interval is in a step.

    Where updates are late, steps overlap: the next one runs beside them as this one did beside
    those of the step before. What began before the step is then in the place of the next one's.
    """
    (start, end), (begin, stop) = interval, step
    if end > begin and start < stop:
        yield max(start, begin), min(end, stop)
    if is_late and start < begin:
        yield start + stop - begin, min(end, begin) + stop - begin


"""When something begins and ends, in picoseconds."""


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operation on one rank: when it ran. `step` is -1 in setup."""

    operation: str
    step: int
    stream: str
    start_ps: int
    end_ps: int


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class BookEntry:
    """One line of the allocator's book, in the order in which the host issued it.

    `change_bytes` is positive for an allocation. `operation` is the `Allocate`, the `Free`, or for
    a deferred free the `Allocate` at which the memory came back.
    """

    operation: str
    step: int
    pool: str
    buffer: str
    kind: Kind
    change_bytes: int


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One collective as it was handed to the communicator, in issue order.

    `bytes` are ring-equivalent: what this rank sends if the ring algorithm is used.
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
    """A request for which there was no memory: what it would have taken, what was alive with it."""

    operation: str
    needed_bytes: int
    alive: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Memory that one pool takes from its device and keeps, by the ledger of a rank.

    Attributes:
        pool: the pool.
        capacity_bytes: what it may take; None if that is not known.
        course_bytes: what it has after each line of the book that is of this pool. What of it no
            line has booked is rounded up, split off, or cached. After a shortage nothing is served.
        shortage: the first line for which there was no memory.
        needed_bytes: the least that the rank holds at its peak, however long its host waits.
        waits: how often the host waited until memory came back. A run that knows nothing of it is
            too fast.
    """

    pool: str
    capacity_bytes: int | None
    course_bytes: tuple[int, ...]
    shortage: Shortage | None = None
    needed_bytes: int = 0
    waits: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that the pool has at a time."""
        return max(self.course_bytes, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The trace of one rank; `stands_for` ranks did the same at the same times.

    `reservations` are there where a backend simulates memory. `host_bound_ps` has, for each step,
    how long the stream of its Computes had nothing to do but what its host was still issuing; it is
    there where a backend simulates what hosts cost. `memory_wait_ps` has, for each step, how
    long its host waited for memory; there where it did. `witness` is there where somebody watched.
    """

    rank: int
    role: str
    stands_for: int
    events: tuple[Event, ...]
    book: tuple[BookEntry, ...]
    transfers: tuple[Transfer, ...]
    losses: tuple[float, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    host_bound_ps: tuple[int, ...] = ()
    memory_wait_ps: tuple[int, ...] = ()
    witness: Witness | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Bytes that crossed one class of links in one step, summed over the links of the class."""

    link: str
    count: int
    bytes: int
    capacity_bytes_per_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A pool that did not suffice: where, and what was alive, largest first."""

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
    features of the run as JSON, which the error of a ratio of two step times depends on.
    """

    low: float
    high: float
    features: str

    @classmethod
    def of(cls, bounds: tuple[float, float] | None, features: str) -> "StepError | None":
        """Return the error with these bounds, if there are any."""
        return None if bounds is None else cls(low=bounds[0], high=bounds[1], features=features)

    @property
    def half_width(self) -> float:
        """Half of the distance of the bounds, as a share of the prediction."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A run of setup and `steps` steps.

    `step_end_ps` has the end of each step (all streams of all ranks drained of it). `observed`
    holds figures by name that only some backends can see (live storages by class, for one).
    `error` is the error of the step time, None where it is unknown or times were measured;
    `error_text` says it in one line.
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
    """Spans in which one rank computed in the last step, and communicated on each group.

    `on_host` has spans of what the host side of its node did for it, by its name.
    `host_bound_ps` is how long it waited for its host, `memory_wait_ps` how long that waited for
    memory: as in `RankTrace`.
    """

    computing: Sequence[Interval]
    by_group: Mapping[str, Sequence[Interval]]
    on_host: Mapping[str, Sequence[Interval]] = field(default_factory=dict[str, Sequence[Interval]])
    host_bound_ps: int = 0
    memory_wait_ps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """Times of the last step of a trace, and nothing else.

    `ranks` has one of each class that was simulated; what lies outside the step is cut off.
    `error_text` and `error` are those of the trace.
    """

    begin_ps: int
    end_ps: int
    ranks: tuple[RankStep, ...]
    error_text: str
    error: StepError | None = None
