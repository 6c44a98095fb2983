"""Track collectives in flight on a CPU: issued, but not waited for yet."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from zsim.schedule.operation import Edge, Previous


class PendingWork(Protocol):
    """An issued collective that may still be running."""

    def wait(self) -> object:
        """Wait until it has finished: on the host, or on a GPU in the current stream."""
        ...


class BufferAccess(NamedTuple):
    """Elements `start` to `end` of a buffer that an operation reads or writes."""

    buffer: str
    start: int
    end: int
    writes: bool

    def conflicts(self, other: "BufferAccess") -> bool:
        """Return True if both touch a common element and at least one writes."""
        return (
            self.buffer == other.buffer
            and (self.writes or other.writes)
            and max(self.start, other.start) < min(self.end, other.end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEntry:
    """An operation, as the streams use it.

    `after` may omit edges that other edges imply. Without `is_awaited` no operation waits for this
    one. The other fields are used for collectives only: the communicator, its number in the
    schedule, its ranks (for a message, the ranks at the other end), and the accessed elements.
    """

    operation: str
    stream: str
    after: tuple[Edge, ...] = ()
    is_awaited: bool = True
    group: str = ""
    group_number: int = 0
    ranks: tuple[int, ...] = ()
    is_message: bool = False
    touches: tuple[BufferAccess, ...] = ()


@dataclass(slots=True, eq=False)
class Flight:
    """A collective that was issued and not waited for yet."""

    entry: StreamEntry
    step: int
    number: int
    issued_ns: int
    works: list[PendingWork]
    before: list["Flight"]
    on_group: int
    """Number of operations issued on its communicator so far, including this one."""
    end_ns: int | None = None


@dataclass(slots=True)
class Flights:
    """Collectives in flight on this rank, in the order of issue, and by operation and stream."""

    alive: dict[int, Flight] = field(default_factory=dict[int, Flight])
    """Collectives that have not finished, by number."""
    _by_operation: dict[str, Flight] = field(default_factory=dict[str, Flight])
    _by_stream: dict[str, list[Flight]] = field(default_factory=dict[str, list[Flight]])
    _by_group: dict[str, list[Flight]] = field(default_factory=dict[str, list[Flight]])
    _touched: Counter[str] = field(default_factory=Counter[str])

    def __bool__(self) -> bool:
        return bool(self.alive)

    def __iter__(self) -> Iterator[Flight]:
        return iter([*self.alive.values()])

    def add(self, flight: Flight) -> None:
        """Add a collective that was just issued."""
        entry = flight.entry
        self.alive[flight.number] = flight
        self._by_operation[entry.operation] = flight
        self._by_stream.setdefault(entry.stream, []).append(flight)
        self._by_group.setdefault(entry.group, []).append(flight)
        for touch in entry.touches:
            self._touched[touch.buffer] += 1

    def remove(self, flight: Flight) -> None:
        """Remove a collective that has finished."""
        entry = flight.entry
        del self.alive[flight.number]
        self._by_stream[entry.stream].remove(flight)
        self._by_group[entry.group].remove(flight)
        for touch in entry.touches:
            self._touched[touch.buffer] -= 1
        if self._by_operation.get(entry.operation) is flight:
            del self._by_operation[entry.operation]

    def named(self, edges: Iterable[Edge]) -> list[Flight]:
        """Return the unfinished collectives that `edges` name."""
        found: list[Flight] = []
        for edge in edges:
            # No collective is in flight across steps, so those of earlier steps have finished.
            if not isinstance(edge, Previous) and edge in self._by_operation:
                found.append(self._by_operation[edge])
        return found

    def users(self, home: str, buffer: str, uses: Sequence[Edge]) -> list[Flight]:
        """Return the collectives in `uses`, and those on stream `home` that touch `buffer`."""
        found = self.named(uses) if uses else []
        if on_home := self._by_stream.get(home):
            found += [
                flight
                for flight in on_home
                if any(touch.buffer == buffer for touch in flight.entry.touches)
            ]
        return found

    def before(self, entry: StreamEntry) -> list[Flight]:
        """Return the collectives ordered before `entry`: by stream, by `after` and by group.

        The last collective of a stream or group stands for the earlier ones, which are in its
        `before`.
        """
        found = self.named(entry.after) if entry.after else []
        on_stream = self._by_stream.get(entry.stream)
        if on_stream:
            found.append(on_stream[-1])
        of_group = self._by_group.get(entry.group) if entry.group else None
        if of_group and not (on_stream and of_group[-1] is on_stream[-1]):
            found.append(of_group[-1])
        return found

    def touch(self, entry: StreamEntry) -> bool:
        """Return True if a collective in flight touches a buffer that `entry` touches."""
        return any(self._touched.get(touch.buffer) for touch in entry.touches)


def closure(flights: Iterable[Flight]) -> list[Flight]:
    """Return `flights` and all unfinished ones ordered before them, in the order of issue."""
    found: dict[int, Flight] = {}
    stack = list(flights)
    while stack:
        flight = stack.pop()
        if flight.end_ns is None and flight.number not in found:
            found[flight.number] = flight
            stack += flight.before
    return [found[number] for number in sorted(found)]
