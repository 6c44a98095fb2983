"""Places of buffers and views in spaces, and the pieces that each rank has of them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from zsim.proof.execution.grid import Grid, RankArray
from zsim.proof.execution.pieces import Integers, Key, Space, Spaces
from zsim.proof.execution.unions import Adopted
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import View
from zsim.schedule.schedule import Buffer, Program, Schedule

NOTHING = -1
"""The number of a missing piece, on a rank with fewer pieces than others."""


@dataclass(frozen=True, slots=True)
class Index:
    """Places of a view in a buffer's array: a slice, or numbers that differ by rank.

    `take` has shape (ranks..., places of the view); NOTHING for places that a rank does not have.
    `is_whole` is True if they are all places of the array.
    """

    low: int
    high: int
    take: Integers | None = None
    is_whole: bool = False

    @property
    def count(self) -> int:
        """The number of places of the view, the maximum over ranks."""
        return self.high - self.low if self.take is None else self.take.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class BufferPieces:
    """Content of a buffer of a class: its space, and the pieces of it on each rank.

    `first` is the number of the first piece and `counts` the number of pieces, both in the shape
    of the ranks; `width` is the length of the array that holds them.
    """

    space: Space
    first: Integers
    counts: Integers
    width: int


class Tensors:
    """Buffers and views of all classes: spaces are cut, then closed, then indices are computed."""

    def __init__(self, schedule: Schedule, grid: Grid, adopted: Adopted | None = None) -> None:
        self.schedule = schedule
        self._buffers: dict[tuple[str, str], Buffer] = {}
        for (role, name), (held, shard) in (adopted or {}).items():
            (program,) = (each for each in schedule.programs if each.role == role)
            self._buffers[role, name] = replace(program.by_name[name], layout=held, shard=shard)
        self.grid = grid
        self.mesh = schedule.mesh
        self.parameters = {each.name: each.elements for each in schedule.contract.parameters}
        self._seen: set[int] = set()
        self._held: dict[tuple[int, str], BufferPieces] = {}
        self._held_alike: dict[tuple[object, ...], BufferPieces] = {}
        self._kinds: dict[tuple[int, int], tuple[int, View]] = {}
        self._kind_of: dict[tuple[object, ...], int] = {}
        self._cut_of: dict[str | None, int] = {None: -1}
        self._indices: dict[tuple[int, int], Index] = {}
        self._indices_alike: dict[int, Index] = {}
        self._folded = any(
            len(along.coordinates) < schedule.mesh.axis_size(name)
            for name, along in grid.tracked.items()
        )
        self._run: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        self.spaces = Spaces(merges=self._number_layouts())
        for name, elements in self.parameters.items():
            self.spaces.space(("parameter", name), elements)
        used = {buffer.layout for program in schedule.programs for buffer in program.buffers}
        for layout in schedule.layouts:
            self.spaces.space(("layout", layout.name), layout.elements)
            if layout.name in used:
                self._add_layout(layout)
        for program in schedule.programs:
            for buffer in program.buffers:
                own = self.buffer(program, buffer.name)
                self.spaces.space(self.key(program, own.name), self._extent(own))

    def _number_layouts(self) -> bool:
        """Assign numbers to layouts by their cuts; return True if most have equal contents."""
        cut: dict[object, int] = {}
        filled: set[object] = set()
        for layout in self.schedule.layouts:
            key = (layout.axis, layout.elements, layout.cuts, layout.blocks)
            self._cut_of[layout.name] = cut.setdefault(key, len(cut))
            filled.add((key, *((piece.start, piece.size) for piece in layout.pieces)))
        is_whole = all(
            name in self.grid.standing or len(along.coordinates) == self.mesh.axis_size(name)
            for name, along in self.grid.tracked.items()
        )
        return is_whole and 2 * len(filled) <= len(self.schedule.layouts)

    def _pieces_key(self, ranks: RankArray, buffer: Buffer) -> tuple[object, ...]:
        """Return a key that is equal for buffers of which ranks have the same pieces."""
        space = self.spaces.by_key[self.key(ranks.program, buffer.name)]
        cut = self._cut_of[buffer.layout]
        return (ranks.index, space.key, cut, buffer.shard, buffer.elements)

    def kind(self, ranks: RankArray, view: View) -> int:
        """Return a number that is equal for views at the same place of equivalent buffers."""
        key = (ranks.index, id(view))  # hashing a view takes longer
        found = self._kinds.get(key)
        if found is None:
            place = (view.start, view.size, view.axis, self._cut_of[view.layout], view.origin)
            alike = (*self._pieces_key(ranks, self.buffer(ranks.program, view.buffer)), *place)
            number = self._kind_of.setdefault(alike, len(self._kind_of))
            found = self._kinds[key] = number, view
        return found[0]

    def buffer(self, program: Program, name: str) -> Buffer:
        """Return a buffer; one without a layout gets the layout of which it holds a part."""
        return self._buffers.get((program.role, name)) or program.by_name[name]

    def _extent(self, buffer: Buffer) -> int:
        if buffer.layout is None:
            return buffer.elements
        layout = self.schedule.layout_by_name[buffer.layout]
        return layout.elements if buffer.shard else max(layout.elements, buffer.elements)

    def key(self, program: Program, name: str) -> Key:
        """Return the space in which the elements of a buffer are counted."""
        buffer = self.buffer(program, name)
        if buffer.layout is not None:
            return ("layout", buffer.layout)
        return ("buffer", program.role, buffer.name)

    def _add_layout(self, layout: Layout) -> None:
        key = ("layout", layout.name)
        self.spaces.space(key, layout.elements)
        if (
            layout.axis is not None
            and self._folded
            and not any(axis in self.grid.standing for axis in self.mesh.parts(layout.axis))
        ):
            axes = self.mesh.parts(layout.axis)
            count = self.mesh.axis_size(layout.axis)
            own: list[tuple[int, int, int]] = []
            for number, weight in self.run(axes):
                start, size = layout.segment(number, count)
                own.append((start, start + size, weight))
            self.spaces.split(key, 0, layout.elements, tuple(own))
        for parameter, offset, place, size in self.fragments(layout):
            known = max(self.parameters.get(parameter, 0), offset + size)
            self.parameters.setdefault(parameter, known)
            self.spaces.space(("parameter", parameter), known)
            self.spaces.link((key, place), (("parameter", parameter), offset), size)
        if layout.axis is not None and layout.blocks is not None and self._folded:
            self._split_parameters(layout)

    def _split_parameters(self, layout: Layout) -> None:
        """Omit the parts of each parameter on ranks that are not run."""
        assert layout.axis is not None
        count = self.mesh.axis_size(layout.axis)
        parts: dict[str, list[tuple[int, int, int]]] = {}
        for number, weight in self.run(self.mesh.parts(layout.axis)):
            for each in layout.fragments(count, number):
                if each.size:
                    own = parts.setdefault(each.parameter, [])
                    own.append((each.offset, each.offset + each.size, weight))
        for piece in layout.pieces:
            key = ("parameter", piece.parameter)
            self.spaces.space(key, piece.size)
            self.spaces.split(key, 0, piece.size, tuple(sorted(parts.get(piece.parameter, ()))))

    def run(self, axes: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return (number, weight) along single axes, the last fastest, of ranks that are run."""
        if axes not in self._run:
            found = [(0, 1)]
            for axis in axes:
                size, along = self.mesh.axis_size(axis), self.grid.tracked[axis]
                pairs = list(zip(along.coordinates, along.weights, strict=True))
                found = [(n * size + m, v * w) for n, v in found for m, w in pairs]
            self._run[axes] = found
        return self._run[axes]

    def split(self, key: Key, start: int, size: int, axes: tuple[str, ...]) -> None:
        """Assign parts of `size` from `start` on to ranks along `axes`, one each."""
        if not self._folded or not size or any(axis in self.grid.standing for axis in axes):
            return
        count = 1
        for axis in axes:
            count *= self.mesh.axis_size(axis)
        parts = tuple(
            (start + number * size, start + (number + 1) * size, weight)
            for number, weight in self.run(axes)
        )
        self.spaces.split(key, start, start + count * size, parts)

    def fragments(self, layout: Layout) -> Iterator[tuple[str, int, int, int]]:
        """Yield parameter, offset in it, place in the whole layout, and size of each fragment."""
        if layout.axis is None or layout.blocks is None:
            for piece in layout.pieces:
                if piece.size:
                    yield piece.parameter, 0, piece.start, piece.size
            return
        count = self.mesh.axis_size(layout.axis)
        for number, _ in self.run(self.mesh.parts(layout.axis)):
            first = layout.segment(number, count)[0]
            for each in layout.fragments(count, number):
                if each.size:
                    yield each.parameter, each.offset, first + each.position, each.size

    def segment(self, buffer: Buffer, at: Coordinates) -> tuple[int, int]:
        """Return start and size, in its space, of a rank's part of a buffer."""
        if buffer.shard is None or buffer.layout is None:
            return 0, buffer.elements
        return self._segment(self.schedule.layout_by_name[buffer.layout], buffer.shard, at)

    def _segment(self, layout: Layout, axis: str, at: Coordinates) -> tuple[int, int]:
        """Return start and size of a rank's part, with those of the ranks it represents."""
        assert layout.axis is not None
        count = self.mesh.axis_size(layout.axis)
        start, size = layout.segment(at[axis], count)
        ranks = self._as_one(axis, at)
        if ranks > 1:
            last = layout.segment(at[axis] + ranks - 1, count)
            size = last[0] + last[1] - start
        return start, size

    def _as_one(self, axis: str, at: Coordinates) -> int:
        """Return the number of ranks along an axis whose parts a rank holds."""
        return self.grid.standing[axis][at[axis]] if axis in self.grid.standing else 1

    def place(self, program: Program, view: View, at: Coordinates) -> tuple[int, int]:
        """Return start and size of a view of one rank in the space of its buffer."""
        buffer = self.buffer(program, view.buffer)
        first = self.segment(buffer, at)
        if view.layout is not None:
            layout = self.schedule.layout_by_name[view.layout]
            assert layout.axis is not None
            count, own = self.mesh.axis_size(layout.axis), at[layout.axis]
            ranks = self._as_one(layout.axis, at)
            start, size = layout.window(view.start, view.size, own, count, ranks=ranks)
            if view.origin is not None and size:
                start += view.origin + layout.segment(own, count)[0] - view.start
            return first[0] + start, size
        if view.axis is not None:
            ranks = self._as_one(view.axis, at)
            return first[0] + view.start + at[view.axis] * view.size, view.size * ranks
        if buffer.shard is not None and view.size == buffer.elements:
            return first
        return first[0] + view.start, view.size

    def varies(self, program: Program, view: View) -> frozenset[str]:
        """Return the single axes along which the place of a view depends on the rank."""
        layout = None if view.layout is None else self.schedule.layout_by_name[view.layout]
        axes = (self.buffer(program, view.buffer).shard, view.axis, layout and layout.axis)
        return frozenset(part for axis in axes if axis for part in self.mesh.parts(axis))

    def places(
        self, ranks: RankArray, view: View, more: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Coordinates, int, int]]:
        """Yield coordinates, start and size of a view on every rank that may have another place."""
        axes = self.varies(ranks.program, view) | more
        for _, at in self.grid.ranks(ranks, axes):
            yield at, *self.place(ranks.program, view, at)

    def cut(self, ranks: RankArray, view: View) -> None:
        """Cut the space of a view at its start and end on every rank."""
        kind = self.kind(ranks, view)
        if kind in self._seen:
            return
        self._seen.add(kind)
        space = self.key(ranks.program, view.buffer)
        for _, start, size in self.places(ranks, view):
            self.spaces.cut(space, start, start + size)
        if view.layout is not None:
            if self.schedule.layout_by_name[view.layout].blocks is None:
                self.spaces.by_key["layout", view.layout].bounds.update(
                    (view.start, view.start + view.size)
                )
        elif view.axis is None and self.buffer(ranks.program, view.buffer).shard is None:
            self.spaces.by_key[space].bounds.update((view.start, view.start + view.size))
        if view.axis is not None:
            self.split(space, view.start, view.size, self.mesh.parts(view.axis))

    def link(self, ranks: RankArray, one: View, other: View) -> None:
        """Link the elements of two views on each rank."""
        program = ranks.program
        first = self.key(program, one.buffer)
        second = self.key(program, other.buffer)
        more = self.varies(program, other)
        own = more != self.varies(program, one)
        for at, start, size in self.places(ranks, one, more):
            there = self.place(program, other, at)[0]
            self.spaces.link((first, start), (second, there), size, own=own)

    def link_to(self, ranks: RankArray, view: View, key: Key) -> None:
        """Link the elements of a view of each rank with those of a space, from its start on."""
        program = ranks.program
        space = self.key(program, view.buffer)
        own = bool(self.varies(program, view))
        for _, start, size in self.places(ranks, view):
            self.spaces.space(key, size)
            self.spaces.link((space, start), (key, 0), size, own=own)

    def close(self, classes: Iterable[RankArray]) -> None:
        """Cut at the ends of ranks' parts of buffers, and number all pieces."""
        for ranks in classes:
            for declared in ranks.program.buffers:
                buffer = self.buffer(ranks.program, declared.name)
                key = self.key(ranks.program, buffer.name)
                if buffer.shard is None:
                    self.spaces.cut(key, buffer.elements)
                    continue
                axes = frozenset(self.mesh.parts(buffer.shard))
                for _, at in self.grid.ranks(ranks, axes):
                    start, size = self.segment(buffer, at)
                    self.spaces.cut(key, start, start + size)
        self.spaces.close()

    def held(self, ranks: RankArray, name: str) -> BufferPieces:
        """Return the pieces of a buffer on the ranks of a class."""
        found = self._held.get((ranks.index, name))
        if found is None:
            buffer = self.buffer(ranks.program, name)
            key = self._pieces_key(ranks, buffer)
            found = self._held_alike.get(key) or self._hold(ranks, buffer)
            self._held[ranks.index, name] = self._held_alike[key] = found
        return found

    def _hold(self, ranks: RankArray, buffer: Buffer) -> BufferPieces:
        space = self.spaces.by_key[self.key(ranks.program, buffer.name)]
        axes = frozenset() if buffer.shard is None else frozenset(self.mesh.parts(buffer.shard))
        shape = self._shape(ranks, axes)
        first, counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for position, at in self.grid.ranks(ranks, axes):
            start, size = self.segment(buffer, at)
            low, high = space.inside(start, start + size)
            first[position], counts[position] = low, high - low
        return BufferPieces(space, first, counts, int(counts.max()))

    def _shape(self, ranks: RankArray, axes: frozenset[str]) -> tuple[int, ...]:
        return tuple(len(along.coordinates) if along.name in axes else 1 for along in ranks.along)

    def index(self, ranks: RankArray, view: View) -> Index:
        """Return the places of a view in the array of its buffer."""
        key = (ranks.index, id(view))
        found = self._indices.get(key)
        if found is None:
            kind = self.kind(ranks, view)  # keeps the view alive, so that its id stays unique
            found = self._indices_alike.get(kind)
            if found is None:
                found = self._index(ranks, self.held(ranks, view.buffer), view)
            self._indices[key] = self._indices_alike[kind] = found
        return found

    def _index(self, ranks: RankArray, held: BufferPieces, view: View) -> Index:
        buffer = self.buffer(ranks.program, view.buffer)
        if view.size == buffer.elements and view.axis is None and view.layout is None:
            return Index(0, held.width, is_whole=True)
        axes = self.varies(ranks.program, view)
        ranges: dict[tuple[int, ...], tuple[int, int]] = {}
        for position, at in self.grid.ranks(ranks, axes):
            start, size = self.place(ranks.program, view, at)
            low, high = held.space.inside(start, start + size)
            there = tuple(
                min(place, size - 1) for place, size in zip(position, held.first.shape, strict=True)
            )
            first = int(held.first[there])
            ranges[position] = (low - first, high - first) if high > low else (0, 0)
        if len(set(ranges.values())) == 1:
            ((low, high),) = set(ranges.values())
            return Index(low, high, is_whole=(low, high) == (0, held.width))
        width = max(high - low for low, high in ranges.values())
        take = np.full((*self._shape(ranks, axes), width), NOTHING, np.int64)
        for position, (low, high) in ranges.items():
            take[position][: high - low] = np.arange(low, high)
        return Index(0, width, take)

    def filled(self, ranks: RankArray, view: View) -> NDArray[np.bool_]:
        """Return True where a rank has a piece of a view, shape (ranks..., places)."""
        index, held = self.index(ranks, view), self.held(ranks, view.buffer)
        if index.take is not None:
            there: NDArray[np.bool_] = index.take != NOTHING
            return there
        inside: NDArray[np.bool_] = np.arange(index.low, index.high) < held.counts[..., np.newaxis]
        return inside
