"""Collectives on exact numbers, for all communicators of a group at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from zsim.proof.execution.cover import MIXED, Cover
from zsim.proof.execution.datum import Datum, changed, chosen, read
from zsim.proof.execution.grid import Grid, RankArray
from zsim.proof.execution.pieces import Integers
from zsim.proof.execution.tensors import NOTHING, Index, Tensors
from zsim.schedule.mesh import Group
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    CollectiveOperation,
    Receive,
    ReduceScatter,
    Reduction,
    Send,
    View,
    listed,
)
from zsim.specification.residues import Numbers, product, share, weighted


class UnfollowedError(Exception):
    """Raised if the proof cannot follow a schedule; the message says why."""


@dataclass(frozen=True, eq=False)
class CommunicatorRow:
    """The classes that make up the communicators of a group, next to each other along its axes.

    `dimensions` are those of arrays of ranks (without lanes) along which classes are placed.
    `shape` is the shape of all their ranks, `starts` the start of each class in it. `weights` is
    the number of ranks that each coordinate represents.
    """

    classes: tuple[RankArray, ...]
    dimensions: tuple[int, ...]
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[int, ...], ...]
    coordinates: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, grid: Grid, classes: tuple[RankArray, ...], group: Group) -> "CommunicatorRow":
        """Return the row of `classes` along the axes of `group`."""
        dimensions = tuple(n for n, name in enumerate(grid.axes) if name in group.axes)
        whole = [grid.tracked[name] for name in grid.axes]
        first = np.array(
            [
                [
                    each.coordinates.index(own.coordinates[0])
                    for each, own in zip(whole, ranks.along, strict=True)
                ]
                for ranks in classes
            ]
        )
        low, high = first.min(axis=0), (first + [ranks.shape for ranks in classes]).max(axis=0)
        run = [(each, slice(*ends)) for each, *ends in zip(whole, low, high, strict=True)]
        return cls(
            classes,
            dimensions,
            tuple((high - low).tolist()),
            tuple(tuple(start) for start in (first - low).tolist()),
            tuple(each.weights[inside] for each, inside in run),
            tuple(each.coordinates[inside] for each, inside in run),
        )

    @cached_property
    def members(self) -> int:
        """The number of members of each communicator that are run."""
        return int(np.prod([self.shape[each] for each in self.dimensions], dtype=np.int64))

    @cached_property
    def ranks(self) -> int:
        """The number of members of each communicator."""
        return int(np.prod([sum(self.weights[each]) for each in self.dimensions], dtype=np.int64))

    def joined(self, parts: Sequence[NDArray[Any]], lead: int) -> NDArray[Any]:
        """Join arrays of the classes to one of the row; ranks start at dimension `lead`."""
        ranks = np.broadcast_shapes(*(part.shape[lead:-1] for part in parts))
        full = [self.shape[n] if n in self.dimensions else size for n, size in enumerate(ranks)]
        width = max(part.shape[-1] for part in parts)
        found = np.zeros((*parts[0].shape[:lead], *full, width), parts[0].dtype)
        for place, part in enumerate(parts):
            self.part(place, found, lead)[..., : part.shape[-1]] = part
        return found

    def part(self, place: int, array: NDArray[Any], lead: int) -> NDArray[Any]:
        """Return the part of class number `place` in an array of the row."""
        own, start = self.classes[place], self.starts[place]
        ranks = tuple(
            slice(start[n], start[n] + own.shape[n])
            if n in self.dimensions and array.shape[lead + n] > 1
            else slice(None)
            for n in range(len(self.shape))
        )
        return array[(slice(None),) * lead + ranks]

    def flat(self, array: NDArray[Any], lead: int) -> NDArray[Any]:
        """Move members to the last dimension but one, and leave size 1 in their dimensions."""
        axes = [lead + each for each in self.dimensions]
        rest = [axis for axis in range(array.ndim - 1) if axis not in axes]
        shape = list(array.shape)
        for axis, each in zip(axes, self.dimensions, strict=True):
            shape[axis] = self.shape[each]
        if tuple(shape) != array.shape:
            array = np.broadcast_to(array, shape)
        for axis in axes:
            shape[axis] = 1
        last = array.transpose(*rest, *axes, array.ndim - 1)  # twice as fast as moveaxis
        return last.reshape(*shape[:-1], self.members, shape[-1])

    def unflat(self, array: NDArray[Any], lead: int) -> NDArray[Any]:
        """Undo `flat`."""
        axes = [lead + each for each in self.dimensions]
        rest = array.squeeze(tuple(axes))
        sizes = (self.shape[each] for each in self.dimensions)
        apart = rest.reshape(*rest.shape[:-2], *sizes, rest.shape[-1])
        return np.moveaxis(apart, range(-1 - len(axes), -1), axes)


Bring = tuple[RankArray, CollectiveOperation, Datum]
"""A class's part in a collective: the operation of its program, and the data of its source."""


class CollectiveRunner:
    """Carries out collectives."""

    def __init__(self, grid: Grid, tensors: Tensors) -> None:
        self.grid = grid
        self.tensors = tensors
        self.unordered = False
        """Whether the last collective took a maximum; residues have no order."""
        self._rows: dict[tuple[str, tuple[int, ...]], CommunicatorRow] = {}
        self._takes: dict[tuple[object, ...], Integers] = {}

    def row(self, classes: tuple[RankArray, ...], name: str) -> CommunicatorRow:
        """Return the placement of `classes` of ranks in the communicators of a group; cached."""
        key = (name, tuple(ranks.index for ranks in classes))
        if key not in self._rows:
            group = self.tensors.schedule.group_by_name[name]
            self._rows[key] = CommunicatorRow.of(self.grid, classes, group)
        return self._rows[key]

    def meet(self, brings: Sequence[Bring]) -> list[Datum]:
        """Return the result of a collective for each class.

        Raises:
            UnfollowedError: pieces do not correspond.
        """
        operation = brings[0][1]
        self.unordered = False
        row = self.row(tuple(ranks for ranks, _, _ in brings), operation.group)
        data = [datum for _, _, datum in brings]
        views = tuple(bring.source for _, bring, _ in brings)
        targets = tuple(bring.target for _, bring, _ in brings)
        whole = data[0] if len(data) == 1 else changed(data, row.joined, ranks_only=True)
        match listed(operation):
            case AllGather():
                take = self._gathering(row, views, targets)
                found = changed((whole,), lambda arrays, n: _gathered(row, arrays[0], n, take))
            case ReduceScatter(reduction=reduction):
                whole = self._reduced(row, reduction, whole)
                take = self._scattering(row, targets)
                if int(take.max(initial=-1)) + 1 != whole.count:
                    raise UnfollowedError(f"{operation.id}: parts do not make up the whole")
                found = changed((whole,), lambda arrays, n: _scattered(row, arrays[0], n, take))
            case AllReduce(reduction=reduction):
                found = self._reduced(row, reduction, whole)
            case Broadcast() as broadcast:
                root = self._root(row, broadcast)
                found = changed(
                    (whole,),
                    lambda arrays, n: row.flat(arrays[0], n)[..., root, :],
                    ranks_only=True,
                )
            case AllToAll():
                self._need_blocks(row, views, targets)
                found = changed((whole,), lambda arrays, n: _exchanged(row, arrays[0], n))
            case Send() | Receive():
                raise UnfollowedError(f"{operation.id}: a {operation.name} is no collective")
            case _ as unknown:
                assert_never(unknown)
        if len(brings) == 1:
            return [found]
        return [self._own(row, found, place, target) for place, target in enumerate(targets)]

    def _own(self, row: CommunicatorRow, datum: Datum, place: int, target: View) -> Datum:
        """Return the result for class number `place` of a row."""
        own = changed((datum,), lambda arrays, n: row.part(place, arrays[0], n), ranks_only=True)
        count = self.tensors.index(row.classes[place], target).count
        return read(own, Index(0, count, is_whole=count == own.count))

    def _root(self, row: CommunicatorRow, operation: Broadcast) -> int:
        """Return the number of the root among the members that are run."""
        group = self.tensors.schedule.group_by_name[operation.group]
        limits = self.tensors.mesh.limits(group.where)
        left, found, stride = operation.root, 0, 1
        for place in reversed(row.dimensions):
            limit = limits[self.grid.axes[place]]
            left, number_of = divmod(left, len(limit))
            found += stride * row.coordinates[place].index(limit[number_of])
            stride *= row.shape[place]
        return found

    def _reduced(self, row: CommunicatorRow, reduction: Reduction, datum: Datum) -> Datum:
        """Return the result of a reduction, the same on every rank."""
        ranks, dimensions = row.dimensions, tuple(1 + each for each in row.dimensions)
        found = Datum(self._reduced_values(row, reduction, datum.values))
        if datum.undefined is not None:
            found.undefined = np.logical_or.reduce(datum.undefined, axis=ranks, keepdims=True)
        if datum.words is not None:
            found.words = np.bitwise_or.reduce(datum.words, axis=dimensions, keepdims=True)
        if datum.pieces is not None:
            highest = np.maximum.reduce(datum.pieces, axis=ranks, keepdims=True)
            alike = (datum.pieces == 0) | (datum.pieces == highest)
            found.pieces = np.where(alike.all(axis=ranks, keepdims=True), highest, MIXED)
        if datum.covered is not None:
            every = np.bitwise_or.reduce(datum.covered.whole, axis=dimensions, keepdims=True)
            found.covered = Cover(datum.covered.count).with_part(None, every)
        return found

    def _reduced_values(
        self, row: CommunicatorRow, reduction: Reduction, values: Numbers
    ) -> Numbers:
        dimensions = tuple(1 + each for each in row.dimensions)
        if reduction is Reduction.MAX:
            first: Numbers = values.max(axis=dimensions, keepdims=True)
            self.unordered = self.unordered or bool((values != first).any())
            return first
        for place in row.dimensions:
            values = weighted(values, 1 + place, row.weights[place])
        if reduction is Reduction.AVERAGE and row.ranks > 1:
            values = product(values, share(row.ranks, values.ndim))
        return values

    def _counts(self, row: CommunicatorRow, views: tuple[View, ...]) -> Integers:
        """Return the number of pieces in each member's view, by member."""
        parts = [
            self.tensors.filled(ranks, view).sum(axis=-1, keepdims=True)
            for ranks, view in zip(row.classes, views, strict=True)
        ]
        lengths = row.flat(row.joined(parts, 0), 0).reshape(-1, row.members)
        if (lengths != lengths[0]).any():
            raise UnfollowedError(f"views {views[0]} are cut differently on other ranks")
        found: Integers = lengths[0]
        return found

    def _gathering(
        self, row: CommunicatorRow, views: tuple[View, ...], targets: tuple[View, ...]
    ) -> Integers:
        """Return for each place of the target its place in the concatenated sources."""
        kinds = (map(self.tensors.kind, row.classes, each) for each in (views, targets))
        key = (row, *chain.from_iterable(kinds))
        if key not in self._takes:
            counts = self._counts(row, views)
            width = max(
                self.tensors.index(ranks, view).count
                for ranks, view in zip(row.classes, views, strict=True)
            )
            take = [np.arange(count) + member * width for member, count in enumerate(counts)]
            whole = np.concatenate(take)
            for ranks, target in zip(row.classes, targets, strict=True):
                if self.tensors.index(ranks, target).count != len(whole):
                    raise UnfollowedError(f"{target.buffer} is not cut as what is gathered into it")
            self._takes[key] = whole
        return self._takes[key]

    def _need_blocks(
        self, row: CommunicatorRow, views: tuple[View, ...], targets: tuple[View, ...]
    ) -> None:
        """Raise UnfollowedError unless every member has one block for each member, all of one size.

        Raises:
            UnfollowedError: they do not.
        """
        counts = {int(count) for each in (views, targets) for count in self._counts(row, each)}
        if len(counts) != 1 or min(counts) % row.ranks or row.members != row.ranks:
            raise UnfollowedError(f"{views[0].buffer} is not cut as what it is exchanged with")

    def _scattering(self, row: CommunicatorRow, targets: tuple[View, ...]) -> Integers:
        """Return, by member, the places of the whole that it receives."""
        key = (row, *map(self.tensors.kind, row.classes, targets))
        if key not in self._takes:
            counts = self._counts(row, targets)
            width = max(
                self.tensors.index(ranks, target).count
                for ranks, target in zip(row.classes, targets, strict=True)
            )
            take = np.full((row.members, width), NOTHING, np.int64)
            start = 0
            for member, count in enumerate(counts):
                take[member, :count] = np.arange(start, start + count)
                start += int(count)
            self._takes[key] = take
        return self._takes[key]


def _gathered(row: CommunicatorRow, array: NDArray[Any], lead: int, take: Integers) -> NDArray[Any]:
    flat = row.flat(array, lead)
    whole = flat.reshape(*flat.shape[:-2], -1)
    return whole[..., take]


def _scattered(
    row: CommunicatorRow, array: NDArray[Any], lead: int, take: Integers
) -> NDArray[Any]:
    parts = chosen(array, take.reshape(-1))
    apart = parts.reshape(*parts.shape[:-1], *take.shape)
    return row.unflat(apart, lead)


def _exchanged(row: CommunicatorRow, array: NDArray[Any], lead: int) -> NDArray[Any]:
    """Return for each member the blocks with its number, in the order of members."""
    flat = row.flat(array, lead)
    blocks = flat.reshape(*flat.shape[:-1], row.members, -1)
    return row.unflat(blocks.swapaxes(-3, -2).reshape(flat.shape), lead)
