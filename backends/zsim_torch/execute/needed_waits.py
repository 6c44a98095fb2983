"""The waits of a step that order something: what is ordered all the same needs no event.

Streams are first-in-first-out. Of each stream, and of the host, it is known up to which position it
has waited for each other stream, and with that for what those had waited for. An edge to what is
known to have finished is left out. Of the edges of one operation the last one issued is looked at
first, since it knows most. Communicators order nothing here, nor do threads of the host: their
edges stay.

A step stands for any: what earlier steps waited for is not known. Each list of a branch begins with
what is known before it; after it is known what is known after both.
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
    SetScalar,
)

Known = dict[str, int]
"""Position on each stream up to which everything has finished. Of other streams nothing is known.

The first operation of a step is at position 1. What is at 0 or before is of earlier steps.
"""

HOST: Final = ""
"""The host, among the streams by what they know."""

_NOTHING: Final = -(1 << 60)

_Path = tuple[tuple[str, bool], ...]
"""Branches that an operation is inside, and in which of their lists."""


class _Place(NamedTuple):
    """Place of an operation: `number` in the order of issue, `position` on its stream."""

    number: int
    stream: str
    position: int
    path: _Path


@dataclass(slots=True)
class NeededWaits:
    """Edges of a step that are needed, by the operation that waits.

    `homes` are the home streams of buffers, and `threads` the streams that are threads of the host.
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
        """Go through the operations of a step."""
        step, made = tuple(step), cls(homes, frozenset(threads))
        made._place_all(step, ())
        made._go_through(step, ())
        return made

    @property
    def awaited(self) -> set[str]:
        """Return the operations that a needed edge names."""
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
                case HostWait(operation=edge):
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
                self._known[waiting] = known  # who asks later, knows nothing now
            if operation.id in self._places and waiting not in self.threads:
                self._at_start[operation.id] = known
            if isinstance(operation, Branch):
                self._go_both_ways(operation, path)

    def _go_both_ways(self, branch: Branch, path: _Path) -> None:
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
        """Return those of `edges` that `waiting` has to wait for; add to `known` what they tell."""
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
    """Raise `known` to what either knows."""
    for stream, position in other.items():
        if known.get(stream, _NOTHING) < position:
            known[stream] = position


def _known_to_both(one: Known, other: Known) -> Known:
    return {
        stream: min(position, other[stream]) for stream, position in one.items() if stream in other
    }
