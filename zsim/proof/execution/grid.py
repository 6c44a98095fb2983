"""The ranks that a proof runs: those of each class (`rank_class`), as arrays along axes.

Along an axis on which ranks send, each rank is a class of its own. Some coordinates of an axis may
represent others: `Along.coordinates` are those that are run, and `weights` is the number of ranks
that each of them represents.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from types import UnionType

from zsim.proof.execution.rank_class import rank_classes
from zsim.schedule.mesh import Coordinates, Group
from zsim.schedule.operation import AllToAll, Communication, PointToPoint, Receive, Send
from zsim.schedule.schedule import Program, Schedule

Placed = tuple[tuple[int, ...], Coordinates]
"""The position of a rank in arrays, and its coordinates."""


Route = tuple[str, int, int]
"""The group of a message, its sender and its receiver."""


@dataclass(frozen=True, slots=True)
class Along:
    """Coordinates of one axis that a class runs, and the number of ranks each represents.

    With `unions`, a coordinate holds the parts of a tensor of all ranks that it represents.
    """

    name: str
    coordinates: tuple[int, ...]
    weights: tuple[int, ...]
    unions: bool = False


@dataclass(frozen=True, eq=False)
class RankArray:
    """The ranks of a class that are run: all combinations of the coordinates along the axes."""

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
    """All classes of a schedule, and the classes that make up each communicator."""

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
        self.classes: list[RankArray] = []
        programs = {program.role: program for program in schedule.programs}
        for ranks in rank_classes(schedule, sending_axes(schedule)):
            along = tuple(
                self._inside(name, *limits)
                for name, limits in zip(self.axes, ranks.limits, strict=True)
            )
            if all(each.coordinates for each in along):
                self.classes.append(RankArray(len(self.classes), programs[ranks.role], along))
        self._ranks: dict[tuple[int, frozenset[str]], list[Placed]] = {}
        self._rows: dict[tuple[int, str], tuple[RankArray, ...]] = {}
        self._routes: dict[tuple[int, str, int, bool], Route] = {}

    def _inside(self, axis: str, low: int, high: int) -> Along:
        """Return the coordinates in [low, high) of an axis that are run."""
        tracked = self.tracked[axis]
        pairs = zip(tracked.coordinates, tracked.weights, strict=True)
        inside = [(place, weight) for place, weight in pairs if low <= place < high]
        return Along(
            axis,
            tuple(place for place, _ in inside),
            tuple(weight for _, weight in inside),
            tracked.unions,
        )

    def row(self, ranks: RankArray, group: Group) -> tuple[RankArray, ...]:
        """Return the classes whose ranks make up the communicators of the class `ranks`."""
        key = (ranks.index, group.name)
        if key not in self._rows:
            fixed = [along for along in ranks.along if along.name not in group.axes]
            self._rows[key] = tuple(
                other
                for other in self.classes
                if all(along in other.along for along in fixed)
                and group.holds(self.mesh, other.coordinates((0,) * len(self.axes)))
            )
        return self._rows[key]

    def at(self, ranks: RankArray, position: tuple[int, ...]) -> Coordinates:
        """Return the coordinates of a rank, with those along joined axes."""
        return self.mesh.completed(ranks.coordinates(position))

    def ranks(self, ranks: RankArray, axes: frozenset[str]) -> list[Placed]:
        """Return positions of ranks that differ along `axes`, with their coordinates."""
        key = (ranks.index, axes)
        if key not in self._ranks:
            ranges = (
                range(len(along.coordinates)) if along.name in axes else range(1)
                for along in ranks.along
            )
            self._ranks[key] = [(place, self.at(ranks, place)) for place in product(*ranges)]
        return self._ranks[key]

    def route(self, ranks: RankArray, message: PointToPoint) -> Route:
        """Return group, sender and receiver of a message of the first rank of a class.

        Along axes on which ranks send, a class has one coordinate.
        """
        sends = isinstance(message, Send)
        key = (ranks.index, message.group, message.offset, sends)
        if key not in self._routes:
            group = self.schedule.group_by_name[message.group]
            at = self.at(ranks, (0,) * len(ranks.shape))
            members, own = group.members(self.mesh, at), group.index(self.mesh, at)
            mine, peer = members[own], members[(own + message.offset) % len(members)]
            ends = (mine, peer) if sends else (peer, mine)
            self._routes[key] = (group.name, *ends)
        return self._routes[key]


def sending_axes(schedule: Schedule) -> frozenset[str]:
    """Return the axes along which some rank sends to another."""
    return _axes_of(schedule, Send | Receive)


def exchanging_axes(schedule: Schedule) -> frozenset[str]:
    """Return the axes along which ranks exchange blocks in an all-to-all."""
    return _axes_of(schedule, AllToAll)


def _axes_of(schedule: Schedule, kind: type | UnionType) -> frozenset[str]:
    """Return the axes of the groups of all operations of a kind."""
    groups = {
        operation.group
        for program in schedule.programs
        for operation in program.patterns
        if isinstance(operation, Communication) and isinstance(operation, kind)
    }
    by_name = schedule.group_by_name
    return frozenset(axis for name in groups for axis in by_name[name].axes)


def every(schedule: Schedule) -> dict[str, Along]:
    """Return axes along which every rank is run."""
    return {
        axis.name: Along(axis.name, tuple(range(axis.size)), (1,) * axis.size)
        for axis in schedule.mesh.axes
    }
