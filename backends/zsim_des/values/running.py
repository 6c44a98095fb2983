"""An operation in progress: its inputs at the start, and faults that it finds at the end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

from zsim.backend.values import A, Seat, Values
from zsim.schedule.operation import Compute, Copy, Fill
from zsim_des.values.value_memory import MemoryBlock


class Fault(NamedTuple):
    """A memory access that no correct schedule makes, whatever it computes."""

    rank: int
    step: int
    operation: str
    buffer: str
    why: str


@dataclass(slots=True, eq=False)
class BlockAccess(Generic[A]):
    """An operation's access to a block.

    `before` is the content at the start. `expected` is the content that a read-only window must
    still have at the end.
    """

    buffer: str
    block: MemoryBlock[A]
    start: int
    size: int
    now: A
    reads: bool
    writes: bool
    before: A | None = None
    expected: A | None = None

    def meets(self, other: "BlockAccess[A]") -> bool:
        """Return True if both have elements in common."""
        return (
            self.block is other.block
            and self.start < other.start + other.size
            and other.start < self.start + self.size
        )


@dataclass(slots=True, eq=False)
class Running(Generic[A]):
    """An entry of a stream, from when the host issues it until it completes.

    `operation` is None for collectives, which their meeting computes. `frees` are blocks to spoil
    after the entry, each with the host time of the free.
    """

    seat: Seat
    step: int
    name: str
    stream: str
    windows: list[BlockAccess[A]]
    operation: Compute | Fill | Copy | None = None
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    frees: list[tuple[int, A]] = field(default_factory=list)
    has_begun: bool = False

    def begin(self, values: Values[A]) -> None:
        """Copy the inputs, once, and spoil the windows that will be written."""
        if self.has_begun:
            return
        self.has_begun = True
        windows = self.windows
        written = [window for window in windows if window.writes]
        for window in windows:
            if window.reads:
                window.before = values.taken(window.now)
        for window in written:
            values.invalidate(window.now)
        for window in windows:
            if window.reads and not window.writes:
                window.expected = window.before
                if any(window.meets(other) for other in written):
                    window.expected = values.taken(window.now)

    def complete(self, values: Values[A]) -> Iterator[Fault]:
        """Store the outputs; yield faults for accesses of others in between."""
        assert self.operation is not None
        yield from self.foreign_writes(values, self.windows)
        made = values.apply(
            self.operation, self.views, seat=self.seat, step=self.step, scalars=self.scalars
        )
        for window, value in zip(self.windows, made, strict=True):
            if value is not None:
                values.store(window.now, value)

    @property
    def views(self) -> Sequence[A]:
        """Return the initial content of each window; for one that is only written, the window."""
        return [window.now if window.before is None else window.before for window in self.windows]

    def foreign_writes(
        self, values: Values[A], windows: Iterable[BlockAccess[A]]
    ) -> Iterator[Fault]:
        """Yield faults for changes that others made to `windows` since the start."""
        for window in windows:
            if window.writes:
                if not values.is_invalidated(window.now):
                    why = "another operation wrote it while this one did"
                    yield Fault(self.seat.rank, self.step, self.name, window.buffer, why)
            elif window.expected is not None and not values.same(window.now, window.expected):
                why = "changed while it was read"
                yield Fault(self.seat.rank, self.step, self.name, window.buffer, why)
