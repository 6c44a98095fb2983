"""Collectives, for all communicators of a group at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from zsim.check.execution.datum import Datum, Marks, Trail, chosen, read
from zsim.check.execution.grid import Grid, RunCell
from zsim.check.execution.pieces import Integers
from zsim.check.execution.tensors import NOTHING, Index, Tensors
from zsim.mesh import Group
from zsim.operation import AllGather, AllReduce, Broadcast, ReduceScatter, Reduction, View
from zsim.specification.field import number, product, share, summed

Collective = AllGather | ReduceScatter | AllReduce | Broadcast


class UnfollowedError(Exception):
    """The proof cannot follow what a schedule does; the message says what, in words."""


@dataclass(frozen=True, eq=False)
class Row:
    """The cells that make up the communicators of a group, side by side along its axes.

    `dimensions` of arrays of ranks (without lanes) along which they lie; `shape` of all their
    ranks; `starts` is where each cell begins; `weights` how many ranks each coordinate stands for.
    """

    cells: tuple[RunCell, ...]
    dimensions: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, grid: Grid, cells: tuple[RunCell, ...], group: Group) -> "Row":
        """Lay the cells out."""
        dimensions = tuple(n for n, name in enumerate(grid.axes) if name in group.axes)
        shape, weights = list(cells[0].shape), [each.weights for each in cells[0].along]
        coordinates = [each.coordinates for each in cells[0].along]
        offsets: dict[tuple[int, int], int] = {}
        for place in dimensions:
            alongs = sorted({cell.along[place] for cell in cells}, key=lambda a: a.coordinates)
            end = 0
            for along in alongs:
                offsets[place, along.coordinates[0]] = end
                end += len(along.coordinates)
            shape[place] = end
            weights[place] = tuple(weight for along in alongs for weight in along.weights)
            coordinates[place] = tuple(each for along in alongs for each in along.coordinates)
        starts = tuple(
            tuple(
                offsets[n, along.coordinates[0]] if n in dimensions else 0
                for n, along in enumerate(cell.along)
            )
            for cell in cells
        )
        return cls(cells, dimensions, tuple(shape), starts, tuple(weights), tuple(coordinates))

    @cached_property
    def members(self) -> int:
        """Members of each communicator that are run."""
        return int(np.prod([self.shape[each] for each in self.dimensions], dtype=np.int64))

    @cached_property
    def ranks(self) -> int:
        """Members of each communicator."""
        return int(np.prod([sum(self.weights[each]) for each in self.dimensions], dtype=np.int64))

    def joined(self, parts: Sequence[NDArray[Any]], lead: int) -> NDArray[Any]:
        """Return arrays of the cells as one of the row; `lead` dimensions are before ranks."""
        if len(parts) == 1:
            return parts[0]
        width = max(part.shape[-1] for part in parts)
        ranks = np.broadcast_shapes(
            *(
                tuple(
                    self.shape[n] if n in self.dimensions else size
                    for n, size in enumerate(part.shape[lead:-1])
                )
                for part in parts
            )
        )
        found = np.zeros((*parts[0].shape[:lead], *ranks, width), parts[0].dtype)
        for cell, start, part in zip(self.cells, self.starts, parts, strict=True):
            place = tuple(
                slice(start[n], start[n] + cell.shape[n]) if n in self.dimensions else slice(None)
                for n in range(len(self.shape))
            )
            where = (slice(None),) * lead + place + (slice(0, part.shape[-1]),)
            found[where] = part
        return found

    def part(self, place: int, array: NDArray[Any], lead: int) -> NDArray[Any]:
        """Return what cell number `place` has of an array of the row."""
        if len(self.cells) == 1:
            return array
        cell, start = self.cells[place], self.starts[place]
        where = tuple(
            slice(start[n], start[n] + cell.shape[n])
            if n in self.dimensions and array.shape[lead + n] > 1
            else slice(None)
            for n in range(len(self.shape))
        )
        return array[(slice(None),) * lead + where]

    def flat(self, array: NDArray[Any], lead: int) -> NDArray[Any]:
        """Return an array with members in one dimension, last but one, and 1 where they were."""
        shape = list(array.shape)
        for each in self.dimensions:
            shape[lead + each] = self.shape[each]
        if tuple(shape) != array.shape:
            array = np.broadcast_to(array, shape)
        axes = [lead + each for each in self.dimensions]
        rest = [axis for axis in range(array.ndim - 1) if axis not in axes]
        last = array.ndim - 1
        for axis in axes:
            shape[axis] = 1
        return array.transpose(*rest, *axes, last).reshape(*shape[:-1], self.members, shape[-1])

    def unflat(self, array: NDArray[Any], lead: int) -> NDArray[Any]:
        """Undo `flat`."""
        axes = [lead + each for each in self.dimensions]
        rest = [axis for axis in range(array.ndim - 2) if axis not in axes]
        sizes = [array.shape[axis] for axis in rest]
        apart = array.reshape(
            *sizes, *(self.shape[each] for each in self.dimensions), array.shape[-1]
        )
        order = sorted(range(len(rest) + len(axes)), key=[*rest, *axes].__getitem__)
        return apart.transpose(*order, apart.ndim - 1)


Bring = tuple[RunCell, Collective, Datum]
"""A cell's part in a collective: the operation of its program, and what its source holds."""


class Meetings:
    """Carries out collectives."""

    def __init__(self, grid: Grid, tensors: Tensors) -> None:
        self.grid = grid
        self.tensors = tensors
        self.unordered = False
        """Whether the last meeting took a maximum of numbers, which have no order in a field."""
        self._rows: dict[tuple[str, tuple[int, ...]], Row] = {}
        self._lengths: dict[tuple[Row, tuple[View, ...]], Integers] = {}
        self._takes: dict[tuple[Row, tuple[View, ...], tuple[View, ...]], Integers] = {}

    def row(self, cells: tuple[RunCell, ...], name: str) -> Row:
        """Return the layout of cells along a group."""
        key = (name, tuple(cell.index for cell in cells))
        if key not in self._rows:
            group = self.tensors.schedule.group_by_name[name]
            self._rows[key] = Row.of(self.grid, cells, group)
        return self._rows[key]

    def meet(self, brings: Sequence[Bring]) -> list[Datum]:
        """Return what each cell gets.

        Raises:
            UnfollowedError: pieces do not correspond.
        """
        operation = brings[0][1]
        self.unordered = False
        row = self.row(tuple(cell for cell, _, _ in brings), operation.group)
        data = [datum for _, _, datum in brings]
        views = tuple(bring.source for _, bring, _ in brings)
        targets = tuple(bring.target for _, bring, _ in brings)
        values = row.joined([datum.values for datum in data], 1)
        undefined = self._undefined(row, data)
        trail = self._trail(row, data)
        covered = self._covered(row, data)
        match operation:
            case AllGather():
                take = self._gathering(row, views, targets)
                found = _each(values, undefined, trail, lambda a, n: _gathered(row, a, n, take))
            case ReduceScatter(reduction=reduction):
                whole = self._reduced(row, reduction, Datum(values, undefined, trail))
                if row.members == 1:
                    found = whole
                else:
                    take = self._scattering(row, targets)
                    if int(take.max(initial=-1)) + 1 != whole.count:
                        raise UnfollowedError(f"{operation.id}: parts do not make up the whole")
                    found = _each(
                        whole.values,
                        whole.undefined,
                        whole.trail,
                        lambda a, n: _scattered(row, a, n, take),
                    )
            case AllReduce(reduction=reduction):
                found = self._reduced(row, reduction, Datum(values, undefined, trail, covered))
            case Broadcast():
                root = self._root(row, operation)
                found = _each(values, undefined, trail, lambda a, n: _sent(row, a, n, root))
                if covered is not None:
                    found.covered = _sent(row, covered, 1, root)
            case _:
                assert_never(operation)
        if len(brings) == 1:
            return [found]
        parts = [_part(row, place, found) for place in range(len(brings))]
        return [
            read(part, Index(0, self.tensors.index(cell, bring.target).count))
            for part, (cell, bring, _) in zip(parts, brings, strict=True)
        ]

    def _root(self, row: Row, operation: Broadcast) -> int:
        """Return the number of the root among the members that are run."""
        group = self.tensors.schedule.group_by_name[operation.group]
        limits = self.tensors.mesh.limits(group.where)
        left, found, stride = operation.root, 0, 1
        for place in reversed(row.dimensions):
            limit = limits[self.grid.axes[place]]
            left, number_of = divmod(left, len(limit))
            found += stride * row.coordinates[place].index(limit.start + number_of)
            stride *= row.shape[place]
        return found

    def _undefined(self, row: Row, data: Sequence[Datum]) -> Marks | None:
        if all(datum.undefined is None for datum in data):
            return None
        ones = (1,) * len(row.shape)
        marks = [
            np.zeros((*ones, datum.count), bool) if datum.undefined is None else datum.undefined
            for datum in data
        ]
        return row.joined(marks, 0)

    def _trail(self, row: Row, data: Sequence[Datum]) -> Trail | None:
        known = [datum.trail for datum in data if datum.trail is not None]
        if not known:
            return None
        ones = (1,) * len(row.shape)
        trails = [
            datum.trail
            or Trail(
                np.zeros((len(known[0].words), *ones, datum.count), np.uint64),
                np.full((*ones, datum.count), -1, np.int64),
            )
            for datum in data
        ]
        words = row.joined([trail.words for trail in trails], 1)
        pieces = row.joined([trail.pieces + 1 for trail in trails], 0)
        return Trail(words, pieces - 1)

    def _covered(self, row: Row, data: Sequence[Datum]) -> NDArray[np.uint64] | None:
        known = [datum.covered for datum in data if datum.covered is not None]
        if not known:
            return None
        parts = [np.zeros_like(known[0]) if each.covered is None else each.covered for each in data]
        return row.joined(parts, 1)

    def _reduced(self, row: Row, reduction: Reduction, datum: Datum) -> Datum:
        dimensions = tuple(1 + each for each in row.dimensions)
        ranks = row.dimensions
        undefined, trail, covered = datum.undefined, datum.trail, datum.covered
        if undefined is not None:
            undefined = np.logical_or.reduce(undefined, axis=ranks, keepdims=True)
        if trail is not None:
            words = np.bitwise_or.reduce(trail.words, axis=dimensions, keepdims=True)
            pieces = trail.pieces
            highest = np.maximum.reduce(pieces, axis=ranks, keepdims=True)
            known = np.where(pieces == -1, highest, pieces)
            alike = (known == highest).all(axis=ranks, keepdims=True)
            trail = Trail(words, np.where(alike, highest, -2))
        if covered is not None:
            covered = np.bitwise_or.reduce(covered, axis=dimensions, keepdims=True)
        values = datum.values
        if reduction is Reduction.MAX:
            first = values.max(axis=dimensions, keepdims=True)
            differ = (values != first).any(axis=(0, *dimensions), keepdims=True)[0]
            self.unordered = self.unordered or bool(differ.any())
            return Datum(first, undefined, trail, covered)
        for place, axis in zip(row.dimensions, dimensions, strict=True):
            weights = row.weights[place]
            if values.shape[axis] == 1:
                if sum(weights) > 1:
                    values = product(values, number(sum(weights), values.ndim))
                continue
            if any(weight != 1 for weight in weights):
                shape = [1] * values.ndim
                shape[axis] = len(weights)
                values = product(values, np.array(weights, np.uint64).reshape(shape))
            values = summed(values, axis, keepdims=True)
        if reduction is Reduction.AVERAGE and row.ranks > 1:
            values = product(values, share(row.ranks, values.ndim))
        return Datum(values, undefined, trail, covered)

    def _counts(self, row: Row, views: tuple[View, ...]) -> Integers:
        """Return how many pieces each member has of its view, by member."""
        key = (row, views)
        found = self._lengths.get(key)
        if found is None:
            parts = [
                self.tensors.lengths(cell, view)
                for cell, view in zip(row.cells, views, strict=True)
            ]
            shaped = [part[..., np.newaxis] for part in parts]
            whole = row.flat(row.joined(shaped, 0), 0)
            lengths = whole.reshape(-1, row.members)
            if (lengths != lengths[0]).any():
                raise UnfollowedError(f"views {views[0]} are cut differently on other ranks")
            found = self._lengths[key] = lengths[0]
        return found

    def _gathering(self, row: Row, views: tuple[View, ...], targets: tuple[View, ...]) -> Integers:
        """Return for each place of the target which place it is of what members bring in a row."""
        key = (row, views, targets)
        if key not in self._takes:
            counts = self._counts(row, views)
            width = max(
                self.tensors.index(cell, view).count
                for cell, view in zip(row.cells, views, strict=True)
            )
            take = [np.arange(count) + member * width for member, count in enumerate(counts)]
            whole = np.concatenate(take)
            for cell, target in zip(row.cells, targets, strict=True):
                if self.tensors.index(cell, target).count != len(whole):
                    raise UnfollowedError(f"{target.buffer} is not cut as what is gathered into it")
            self._takes[key] = whole
        return self._takes[key]

    def _scattering(self, row: Row, targets: tuple[View, ...]) -> Integers:
        """Return by member which places of the whole it gets."""
        key = (row, (), targets)
        if key not in self._takes:
            counts = self._counts(row, targets)
            width = max(
                self.tensors.index(cell, target).count
                for cell, target in zip(row.cells, targets, strict=True)
            )
            take = np.full((row.members, width), NOTHING, np.int64)
            start = 0
            for member, count in enumerate(counts):
                take[member, :count] = np.arange(start, start + count)
                start += int(count)
            self._takes[key] = take
        return self._takes[key]


def _each(
    values: NDArray[Any],
    undefined: Marks | None,
    trail: Trail | None,
    change: Callable[[NDArray[Any], int], NDArray[Any]],
) -> Datum:
    """Return a datum whose arrays are all changed alike; `change` is told how many lanes lead."""
    marks = None if undefined is None else change(undefined, 0)
    moved = None if trail is None else trail.moved(change)
    return Datum(change(values, 1), marks, moved)


def _gathered(row: Row, array: NDArray[Any], lead: int, take: Integers) -> NDArray[Any]:
    flat = row.flat(array, lead)
    whole = flat.reshape(*flat.shape[:-2], -1)
    return whole[..., take]


def _scattered(row: Row, array: NDArray[Any], lead: int, take: Integers) -> NDArray[Any]:
    parts = chosen(array, take.reshape(-1))
    apart = parts.reshape(*parts.shape[:-1], *take.shape)
    return row.unflat(apart, lead)


def _sent(row: Row, array: NDArray[Any], lead: int, root: int) -> NDArray[Any]:
    return row.flat(array, lead)[..., root, :]


def _part(row: Row, place: int, datum: Datum) -> Datum:
    trail = datum.trail
    if trail is not None:
        trail = Trail(row.part(place, trail.words, 1), row.part(place, trail.pieces, 0))
    undefined = None if datum.undefined is None else row.part(place, datum.undefined, 0)
    covered = None if datum.covered is None else row.part(place, datum.covered, 1)
    return Datum(row.part(place, datum.values, 1), undefined, trail, covered)
