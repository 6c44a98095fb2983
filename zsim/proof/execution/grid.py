"""The ranks that a proof runs: those of each cell (`zsim.proof.rank_class`), as arrays along axes.

Along an axis on which ranks send, each rank is a cell of its own. Of an axis some coordinates may
stand for others: `Along.coordinates` are those that are run, and `weights` how many ranks each of
them stands for.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product

from zsim.proof.rank_class import cells
from zsim.schedule.access import touching
from zsim.schedule.mesh import Coordinates, Group
from zsim.schedule.operation import Receive, Send
from zsim.schedule.schedule import Program, Schedule

Placed = tuple[tuple[int, ...], Coordinates]
"""The position of a rank in arrays, and its coordinates."""


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
class RunCell:
    """The ranks of a cell that are run: all combinations of the coordinates along the axes."""

    index: int
    program: Program
    along: tuple[Along, ...]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Number of coordinates along each axis."""
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
        self.cells: list[RunCell] = []
        programs = {program.role: program for program in schedule.programs}
        for cell in cells(schedule, sending_axes(schedule)):
            along = tuple(
                self._inside(name, *limits)
                for name, limits in zip(self.axes, cell.limits, strict=True)
            )
            if all(each.coordinates for each in along):
                self.cells.append(RunCell(len(self.cells), programs[cell.role], along))
        self._ranks: dict[tuple[int, frozenset[str]], list[Placed]] = {}
        self._rows: dict[tuple[int, str], tuple[RunCell, ...]] = {}

    def _inside(self, axis: str, low: int, high: int) -> Along:
        """Return the coordinates of [low, high) of an axis that are run."""
        tracked = self.tracked[axis]
        pairs = zip(tracked.coordinates, tracked.weights, strict=True)
        inside = [(place, weight) for place, weight in pairs if low <= place < high]
        return Along(
            axis,
            tuple(place for place, _ in inside),
            tuple(weight for _, weight in inside),
            tracked.unions,
        )

    def row(self, cell: RunCell, group: Group) -> tuple[RunCell, ...]:
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

    def at(self, cell: RunCell, position: tuple[int, ...]) -> Coordinates:
        """Return the coordinates of a rank, along joined axes too."""
        return self.mesh.completed(cell.coordinates(position))

    def ranks(self, cell: RunCell, axes: frozenset[str]) -> list[Placed]:
        """Return positions of ranks that differ along `axes`, with their coordinates."""
        key = (cell.index, axes)
        if key not in self._ranks:
            ranges = (
                range(len(along.coordinates)) if along.name in axes else range(1)
                for along in cell.along
            )
            self._ranks[key] = [(place, self.at(cell, place)) for place in product(*ranges)]
        return self._ranks[key]

    def route(self, cell: RunCell, message: Send | Receive) -> tuple[str, int, int]:
        """Return the group of a message of the first rank of a cell, who sends it and who gets it.

        Along axes on which ranks send, a cell has one coordinate.
        """
        group = self.schedule.group_by_name[message.group]
        at = self.at(cell, (0,) * len(cell.shape))
        members, own = group.members(self.mesh, at), group.index(self.mesh, at)
        peer = members[(own + message.offset) % len(members)]
        if isinstance(message, Send):
            return group.name, members[own], peer
        return group.name, peer, members[own]


def sending_axes(schedule: Schedule) -> frozenset[str]:
    """Return the axes along which some rank sends to another."""
    groups = {
        operation.group
        for program in schedule.programs
        for operation in touching(program.by_id.values())
        if isinstance(operation, Send | Receive)
    }
    by_name = schedule.group_by_name
    return frozenset(axis for name in groups for axis in by_name[name].axes)


def every(schedule: Schedule) -> dict[str, Along]:
    """Run every rank."""
    return {
        axis.name: Along(axis.name, tuple(range(axis.size)), (1,) * axis.size)
        for axis in schedule.mesh.axes
    }
