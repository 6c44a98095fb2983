"""Ranks as coordinates: meshes, boxes (which roles consist of), and groups of ranks.

Properties of a mesh are computed from its axes, so a mesh of 400,000 ranks is cheap. Only
functions that return ranks list them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

Coordinates = Mapping[str, int]


class MeshError(ValueError):
    """Raised for an invalid mesh, span, role or group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A named axis of the mesh with `size` ranks."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name:
            raise MeshError("axis name must not be empty")
        if self.size < 1:
            raise MeshError(f"axis {self.name}: size {self.size} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The coordinates `start` to `end` (exclusive) of one axis, every `step`-th of them."""

    axis: str
    start: int
    end: int
    step: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise MeshError(f"span of {self.axis}: [{self.start}, {self.end}) is empty or negative")
        if self.step < 1:
            raise MeshError(f"span of {self.axis}: step {self.step} must be at least 1")

    @property
    def coordinates(self) -> range:
        """Coordinates in the span."""
        return range(self.start, self.end, self.step)

    @property
    def size(self) -> int:
        """Number of coordinates in the span."""
        return len(self.coordinates)


Box = tuple[Span, ...]
"""Ranks whose coordinate lies in every span; other axes are not limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Neighbouring axes of the mesh that also count as one, such as a data axis split by node.

    The last of `axes` varies fastest with the coordinate. Layouts and views may be split along the
    joined axis or along one of its parts; groups and boxes name the parts.
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """All ranks, as a grid of named axes. The last axis varies fastest with the rank number."""

    axes: tuple[Axis, ...]
    joined: tuple[Joined, ...] = ()

    def __post_init__(self) -> None:
        single = [axis.name for axis in self.axes]
        names = [*single, *(joined.name for joined in self.joined)]
        if len(set(names)) != len(names):
            raise MeshError(f"mesh axes must have different names, got {', '.join(names)}")
        for joined in self.joined:
            start = single.index(joined.axes[0]) if joined.axes and joined.axes[0] in single else 0
            if not joined.axes or tuple(single[start : start + len(joined.axes)]) != joined.axes:
                raise MeshError(
                    f"joined axis {joined.name}: {', '.join(joined.axes) or 'nothing'} "
                    f"must be neighbours among {', '.join(single)}, in this order"
                )

    @property
    def size(self) -> int:
        """Number of ranks, the world size."""
        return prod(axis.size for axis in self.axes)

    def axis_size(self, name: str) -> int:
        """Return the number of ranks along axis `name`.

        Raises:
            MeshError: the mesh has no such axis.
        """
        for axis in self.axes:
            if axis.name == name:
                return axis.size
        return prod(self.axis_size(part) for part in self.parts(name))

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the axes of which axis `name` consists: itself, or the axes that it joins.

        Raises:
            MeshError: the mesh has no such axis.
        """
        single = [axis.name for axis in self.axes]
        if name in single:
            return (name,)
        for joined in self.joined:
            if joined.name == name:
                return joined.axes
        known = ", ".join([*single, *(joined.name for joined in self.joined)])
        raise MeshError(f"no axis {name!r}; the mesh has {known or 'none'}")

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of `rank` by axis name, with those along joined axes.

        Raises:
            MeshError: the mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise MeshError(f"rank {rank} is outside 0 to {self.size - 1}")
        found: dict[str, int] = {}
        for axis in reversed(self.axes):
            rank, found[axis.name] = divmod(rank, axis.size)
        return self.completed({axis.name: found[axis.name] for axis in self.axes})

    def completed(self, coordinates: Coordinates) -> dict[str, int]:
        """Return `coordinates`, which name every single axis, plus those along joined axes."""
        found = dict(coordinates)
        sizes = {axis.name: axis.size for axis in self.axes} if self.joined else {}
        for joined in self.joined:
            number = 0
            for part in joined.axes:
                number = number * sizes[part] + coordinates[part]
            found[joined.name] = number
        return found

    def rank(self, coordinates: Coordinates) -> int:
        """Return the rank number at `coordinates`, which name every single axis."""
        number = 0
        for axis in self.axes:
            number = number * axis.size + coordinates[axis.name]
        return number

    def limits(self, box: Box) -> dict[str, range]:
        """Return the coordinates of `box` along every axis, in the order of the axes.

        Raises:
            MeshError: a span names an unknown axis or leaves the mesh, or two spans name one axis.
        """
        limits = {axis.name: range(axis.size) for axis in self.axes}
        named: set[str] = set()
        for span in box:
            if span.axis not in limits:
                known = ", ".join(limits)
                raise MeshError(f"no axis {span.axis!r}; the mesh has {known or 'none'}")
            size = len(limits[span.axis])
            if span.axis in named:
                raise MeshError(f"axis {span.axis} is limited twice")
            if span.end > size:
                raise MeshError(f"span of {span.axis}: end {span.end} is past its size {size}")
            named.add(span.axis)
            limits[span.axis] = span.coordinates
        return limits

    def box_size(self, box: Box) -> int:
        """Return the number of ranks in `box`."""
        return prod(len(limit) for limit in self.limits(box).values())

    def box_holds(self, box: Box, coordinates: Coordinates) -> bool:
        """Return True if the rank at `coordinates` is in `box`."""
        return all(coordinates[span.axis] in span.coordinates for span in box)

    def boxes_meet(self, one: Box, other: Box) -> bool:
        """Return True if the boxes have a rank in common."""
        first, second = self.limits(one), self.limits(other)
        return all(_meet(first[name], second[name]) for name in first)

    def ranks(self, box: Box = ()) -> Iterator[int]:
        """Yield rank numbers in `box`, ascending. The cost is linear in the size of the mesh."""
        for rank in range(self.size):
            if self.box_holds(box, self.coordinates(rank)):
                yield rank


def _meet(one: range, other: range) -> bool:
    """Return True if two ranges have a number in common."""
    if one.step == other.step == 1:
        return max(one.start, other.start) < min(one.stop, other.stop)
    return any(each in other for each in one)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A partition of some ranks into communicators, defined by axes.

    Ranks in `where` that differ only along `axes` form one communicator. The name identifies the
    communicator: two groups over the same ranks are two communicators, and operations of one run
    one at a time in issue order.
    """

    name: str
    axes: tuple[str, ...]
    where: Box = ()

    def size(self, mesh: Mesh) -> int:
        """Return the number of ranks in one communicator of this group."""
        limits = mesh.limits(self.where)
        return prod(len(limits[axis]) for axis in self.axes)

    def holds(self, mesh: Mesh, coordinates: Coordinates) -> bool:
        """Return True if the rank at `coordinates` belongs to a communicator of this group."""
        return mesh.box_holds(self.where, coordinates)

    def index(self, mesh: Mesh, coordinates: Coordinates) -> int:
        """Return the position of the rank in its communicator, in order of rank number."""
        limits = mesh.limits(self.where)
        number = 0
        for axis in mesh.axes:
            if axis.name in self.axes:
                limit = limits[axis.name]
                number = number * len(limit) + limit.index(coordinates[axis.name])
        return number

    def members(self, mesh: Mesh, coordinates: Coordinates) -> tuple[int, ...]:
        """Return the ranks of the communicator of the rank at `coordinates`, ascending."""
        limits = mesh.limits(self.where)
        places: list[dict[str, int]] = [{}]
        for axis in mesh.axes:
            varies = axis.name in self.axes
            choices = limits[axis.name] if varies else (coordinates[axis.name],)
            places = [{**place, axis.name: choice} for place in places for choice in choices]
        return tuple(mesh.rank(place) for place in places)
