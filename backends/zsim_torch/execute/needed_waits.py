"""Find the waits of a step that need an event, and drop those that other waits imply.

Streams are first-in-first-out. For each stream and for the host, the pass tracks up to which
position it has waited for each other stream, directly or through other waits. An edge to an
operation that is known to have finished is dropped. The edges of one operation are examined from
the last one issued to the first, since the last one implies most. Communicators and host threads
imply no order here: edges to host threads stay.

The pass looks at one step and knows nothing about the waits of earlier steps. Both lists of a
branch start with the knowledge before the branch; after it, only knowledge from both lists remains.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from zsim.schedule.operation import (
    Allocate,
    Branch,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    ReadCounts,
    SetScalar,
)

Known = dict[str, int]
"""Position on each stream up to which all operations have finished; other streams are unknown.

The first operation of a step is at position 1. Positions of 0 and below are in earlier steps.
"""

HOST: Final = ""
"""Name of the host among the streams."""

_NOTHING: Final = -(1 << 60)

_Path = tuple[tuple[str, bool], ...]
"""The branches around an operation, each with the list that it is in."""


class _Place(NamedTuple):
    """Place of an operation: `number` in the order of issue, `position` on its stream."""

    number: int
    stream: str
    position: int
    path: _Path


@dataclass(slots=True)
class NeededWaits:
    """Edges of a step that are needed, by the waiting operation.

    `homes` are the home streams of buffers, and `threads` the streams that are host threads.
    """

    homes: Mapping[str, str]
    threads: frozenset[str]
    edges: dict[str, tuple[Edge, ...]] = field(default_factory=dict[str, tuple[Edge, ...]])
    _places: dict[str, _Place] = field(default_factory=dict[str, _Place])
    _lengths: Known = field(default_factory=Known)
    _at_start: dict[str, Known] = field(default_factory=dict[str, Known])
    _known: dict[str, Known] = field(default_factory=dict[str, Known])

    @classmethod
    def of(
        cls, step: Iterable[Operation], homes: Mapping[str, str], threads: Iterable[str] = ()
    ) -> "NeededWaits":
        """Analyze the operations of a step."""
        step, made = tuple(step), cls(homes, frozenset(threads))
        made._place_all(step, ())
        made._go_through(step, ())
        return made

    @property
    def awaited(self) -> set[str]:
        """Return the operations that needed edges point to."""
        return {_target(edge) for edges in self.edges.values() for edge in edges}

    def _place_all(self, operations: Iterable[Operation], path: _Path) -> None:
        for operation in operations:
            match operation:
                case Branch(then=then, otherwise=otherwise):
                    self._place_all(then, (*path, (operation.id, True)))
                    self._place_all(otherwise, (*path, (operation.id, False)))
                case Allocate() | Free() | HostWait() | SetScalar():
                    pass
                case _:
                    stream = operation.stream
                    self._lengths[stream] = position = self._lengths.get(stream, 0) + 1
                    place = _Place(len(self._places), stream, position, path)
                    self._places[operation.id] = place

    def _go_through(self, operations: Iterable[Operation], path: _Path) -> None:
        waiting: str
        edges: tuple[Edge, ...]
        for operation in operations:
            match operation:
                case Allocate() | SetScalar():
                    continue
                case HostWait(operation=edge) | ReadCounts(operation=edge):
                    waiting, edges = HOST, (edge,)
                case Branch(after=after):
                    waiting, edges = HOST, after
                case Free(buffer=buffer, uses=uses, mode=mode):
                    waiting = self.homes[buffer] if mode is FreeMode.WAITED else HOST
                    edges = uses
                case _:
                    waiting, edges = operation.stream, operation.after
            known = {**self._known.get(waiting, {})}
            _learn(known, self._known.get(HOST, {}))
            self.edges[operation.id] = self._needed(edges, waiting, known, path)
            if not (isinstance(operation, Free) and operation.mode is FreeMode.DEFERRED):
                self._known[waiting] = known  # a deferred free does not wait now
            if operation.id in self._places and waiting not in self.threads:
                self._at_start[operation.id] = known
            if isinstance(operation, Branch):
                self._go_through_branch(operation, path)

    def _go_through_branch(self, branch: Branch, path: _Path) -> None:
        before = dict(self._known)
        self._go_through(branch.then, (*path, (branch.id, True)))
        one, self._known = self._known, before
        self._go_through(branch.otherwise, (*path, (branch.id, False)))
        self._known = {
            stream: _known_to_both(one.get(stream, {}), known)
            for stream, known in self._known.items()
        }

    def _needed(
        self, edges: tuple[Edge, ...], waiting: str, known: Known, path: _Path
    ) -> tuple[Edge, ...]:
        """Return the `edges` that `waiting` must wait for; add the order they imply to `known`."""
        if waiting in self.threads:
            return edges
        needed = set[Edge]()
        for edge in sorted(edges, key=self._recency, reverse=True):
            place = self._places.get(_target(edge))
            if place is None or place.stream in self.threads:
                needed.add(edge)
                continue
            position = place.position
            if isinstance(edge, Previous):
                position -= self._lengths[place.stream]
            if place.stream == waiting or known.get(place.stream, _NOTHING) >= position:
                continue
            needed.add(edge)
            if isinstance(edge, Previous):
                ran = not place.path
            else:
                ran = path[: len(place.path)] == place.path and edge in self._at_start
            if ran:
                _learn(known, {place.stream: position})
                if isinstance(edge, str):
                    _learn(known, self._at_start[edge])
        return tuple(edge for edge in edges if edge in needed)

    def _recency(self, edge: Edge) -> int:
        place = self._places.get(_target(edge))
        if place is None:
            return -1
        return place.number - (len(self._places) if isinstance(edge, Previous) else 0)


def _target(edge: Edge) -> str:
    return edge.operation if isinstance(edge, Previous) else edge


def _learn(known: Known, other: Known) -> None:
    """Raise each position in `known` to that in `other`, if it is higher."""
    for stream, position in other.items():
        if known.get(stream, _NOTHING) < position:
            known[stream] = position


def _known_to_both(one: Known, other: Known) -> Known:
    return {
        stream: min(position, other[stream]) for stream, position in one.items() if stream in other
    }
