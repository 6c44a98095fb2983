"""Collectives that were handed over on a CPU and are not waited for: flights."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from zsim.schedule.operation import Edge, Previous


class PendingWork(Protocol):
    """A collective that was handed over and is under way."""

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
        """Return whether both touch one element and at least one writes."""
        return (
            self.buffer == other.buffer
            and (self.writes or other.writes)
            and max(self.start, other.start) < min(self.end, other.end)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEntry:
    """An operation as the streams see it.

    `after` may leave out what is ordered before all the same. Without `is_awaited` nothing asks for
    its end. What follows matters to collectives alone: the communicator, its number in the
    schedule, its ranks, or for a message those at the other end, and what is touched.
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
    """A collective that was handed over and not waited for."""

    entry: StreamEntry
    step: int
    number: int
    issued_ns: int
    works: list[PendingWork]
    before: list["Flight"]
    on_group: int
    """Count of operations that its communicator was handed with it."""
    end_ns: int | None = None


@dataclass(slots=True)
class Flights:
    """Flights of a rank in the order of issue, and by what they are asked for."""

    alive: dict[int, Flight] = field(default_factory=dict[int, Flight])
    """Those that have not landed, by number."""
    _by_operation: dict[str, Flight] = field(default_factory=dict[str, Flight])
    _by_stream: dict[str, list[Flight]] = field(default_factory=dict[str, list[Flight]])
    _by_group: dict[str, list[Flight]] = field(default_factory=dict[str, list[Flight]])
    _touched: Counter[str] = field(default_factory=Counter[str])

    def __bool__(self) -> bool:
        return bool(self.alive)

    def __iter__(self) -> Iterator[Flight]:
        return iter([*self.alive.values()])

    def add(self, flight: Flight) -> None:
        """Note that `flight` has begun."""
        entry = flight.entry
        self.alive[flight.number] = flight
        self._by_operation[entry.operation] = flight
        self._by_stream.setdefault(entry.stream, []).append(flight)
        self._by_group.setdefault(entry.group, []).append(flight)
        for touch in entry.touches:
            self._touched[touch.buffer] += 1

    def remove(self, flight: Flight) -> None:
        """Note that `flight` has landed."""
        entry = flight.entry
        del self.alive[flight.number]
        self._by_stream[entry.stream].remove(flight)
        self._by_group[entry.group].remove(flight)
        for touch in entry.touches:
            self._touched[touch.buffer] -= 1
        if self._by_operation.get(entry.operation) is flight:
            del self._by_operation[entry.operation]

    def named(self, edges: Iterable[Edge]) -> list[Flight]:
        """Return the flights that `edges` name, if they have not landed."""
        found: list[Flight] = []
        for edge in edges:
            # Nothing flies from step to step, so a previous instance has landed.
            if not isinstance(edge, Previous) and edge in self._by_operation:
                found.append(self._by_operation[edge])
        return found

    def users(self, home: str, buffer: str, uses: Sequence[Edge]) -> list[Flight]:
        """Return the flights among `uses`, and those of the stream `home` that touch a buffer."""
        found = self.named(uses) if uses else []
        if on_home := self._by_stream.get(home):
            found += [
                flight
                for flight in on_home
                if any(touch.buffer == buffer for touch in flight.entry.touches)
            ]
        return found

    def before(self, entry: StreamEntry) -> list[Flight]:
        """Return what ends before `entry` starts: on its stream, in `after`, of its group.

        Of a stream and of a group that is the last flight, which has the others before it.
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
        """Return whether some flight touches a buffer that `entry` touches."""
        return any(self._touched.get(touch.buffer) for touch in entry.touches)


def closure(flights: Iterable[Flight]) -> list[Flight]:
    """Return the flights and all that are ordered before them, in the order of issue."""
    found: dict[int, Flight] = {}
    stack = list(flights)
    while stack:
        flight = stack.pop()
        if flight.end_ns is None and flight.number not in found:
            found[flight.number] = flight
            stack += flight.before
    return [found[number] for number in sorted(found)]
