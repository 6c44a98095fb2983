"""The ranks that a proof runs: cells of ranks of one role, as arrays along the axes of the mesh.

A cell is a box of ranks that run one program. Cells are cut so that each communicator is made of
whole cells: where roles and groups begin and end, and at every rank of an axis along which ranks
send. Of an axis some coordinates may stand for others: `Axis.coordinates` are those that are run,
and `weights` how many ranks each of them stands for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from zsim.mesh import Coordinates, Group
from zsim.operation import Receive, Send, Together, walk
from zsim.schedule import Program, Schedule

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Along:
    """Coordinates of one axis that a cell runs, and how many ranks each stands for.

    With `unions`, what a coordinate holds of a tensor are the parts of all ranks it stands for.
    """

    name: str
    coordinates: tuple[int, ...]
    weights: tuple[int, ...]
    unions: bool = False


@dataclass(frozen=True, eq=False)
class Cell:
    """Ranks of one role: all combinations of the coordinates along the axes."""

    index: int
    program: Program
    along: tuple[Along, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many coordinates there are along each axis."""
        return tuple(len(each.coordinates) for each in self.along)

    def coordinates(self, position: tuple[int, ...]) -> dict[str, int]:
        """Return single-axis coordinates of the rank at `position` of the arrays."""
        return {
            each.name: each.coordinates[place]
            for each, place in zip(self.along, position, strict=True)
        }


class Grid:
    """All cells of a schedule, and which of them make up each communicator."""

    def __init__(self, schedule: Schedule, tracked: dict[str, Along]) -> None:
        self.schedule = schedule
        self.mesh = schedule.mesh
        self.axes = tuple(axis.name for axis in schedule.mesh.axes)
        self.tracked = tracked
        self.standing = {
            name: dict(zip(along.coordinates, along.weights, strict=True))
            for name, along in tracked.items()
            if along.unions
        }
        self.cells: list[Cell] = []
        programs = {program.role: program for program in schedule.programs}
        self._sending = sending_axes(schedule)
        intervals = [self._intervals(name) for name in self.axes]
        for box in product(*intervals):
            place = {along.name: along.coordinates[0] for along in box}
            role = next(role for role in schedule.roles if role.holds(schedule.mesh, place))
            self.cells.append(Cell(len(self.cells), programs[role.name], box))
        self._ranks: dict[
            tuple[int, frozenset[str]], list[tuple[tuple[int, ...], Coordinates]]
        ] = {}
        self._rows: dict[tuple[int, str], tuple[Cell, ...]] = {}

    def _intervals(self, axis: str) -> list[Along]:
        """Return the coordinates of `axis`, cut where cells have to end."""
        tracked, size = self.tracked[axis], self.mesh.axis_size(axis)
        cuts = {0, size}
        boxes = [box for role in self.schedule.roles for box in role.boxes]
        boxes += [group.where for group in self.schedule.groups]
        for box in boxes:
            for span in box:
                if span.axis == axis:
                    cuts |= {span.start, span.end}
        if axis in self._sending:
            cuts |= set(tracked.coordinates)
        found: list[Along] = []
        for low, high in pairwise(sorted(cuts)):
            inside = [
                (coordinate, weight)
                for coordinate, weight in zip(tracked.coordinates, tracked.weights, strict=True)
                if low <= coordinate < high
            ]
            if inside:
                coordinates, weights = zip(*inside, strict=True)
                found.append(Along(axis, coordinates, weights, tracked.unions))
        return found

    def row(self, cell: Cell, group: Group) -> tuple[Cell, ...]:
        """Return the cells whose ranks make up the communicators of the ranks of `cell`."""
        key = (cell.index, group.name)
        if key not in self._rows:
            fixed = [along for along in cell.along if along.name not in group.axes]
            self._rows[key] = tuple(
                other
                for other in self.cells
                if all(along in other.along for along in fixed)
                and group.holds(self.mesh, other.coordinates((0,) * len(self.axes)))
            )
        return self._rows[key]

    def dimensions(self, group: Group) -> tuple[int, ...]:
        """Return the dimensions of arrays, lanes first, along which the group's ranks lie."""
        return tuple(1 + place for place, name in enumerate(self.axes) if name in group.axes)

    def positions(self, cell: Cell, axes: frozenset[str]) -> Iterator[tuple[int, ...]]:
        """Return positions of ranks that differ along `axes`; the others stay at the first."""
        ranges = [
            range(len(along.coordinates)) if along.name in axes else range(1)
            for along in cell.along
        ]
        return product(*ranges)

    def at(self, cell: Cell, position: tuple[int, ...]) -> Coordinates:
        """Return the coordinates of a rank, along joined axes too."""
        return self.mesh.completed(cell.coordinates(position))

    def ranks(self, cell: Cell, axes: frozenset[str]) -> list[tuple[tuple[int, ...], Coordinates]]:
        """Return positions of ranks that differ along `axes`, with their coordinates."""
        key = (cell.index, axes)
        if key not in self._ranks:
            places = self.positions(cell, axes)
            self._ranks[key] = [(place, self.at(cell, place)) for place in places]
        return self._ranks[key]


def sending_axes(schedule: Schedule) -> frozenset[str]:
    """Return the axes along which some rank sends to another."""
    groups = {
        member.group
        for program in schedule.programs
        for part in (program.setup, program.step)
        for operation in walk(part)
        for member in (operation.members if isinstance(operation, Together) else (operation,))
        if isinstance(member, Send | Receive)
    }
    by_name = schedule.group_by_name
    return frozenset(axis for name in groups for axis in by_name[name].axes)


def every(schedule: Schedule) -> dict[str, Along]:
    """Run every rank."""
    return {
        axis.name: Along(axis.name, tuple(range(axis.size)), (1,) * axis.size)
        for axis in schedule.mesh.axes
    }
