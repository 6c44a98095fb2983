"""Groups of ranks as lines and planes of one grid, which is the mesh of a schedule."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import prod

from zsim.schedule.mesh import Axis, Group, Mesh

WORLD = "world"
"""The group of all ranks."""


class RankGridError(ValueError):
    """Groups do not form a grid of ranks, or a rank is not in its group."""


class RankGrid:
    """A grid of ranks in which every group is a line or a plane.

    Attributes:
        mesh: the grid.
        lines: axes of groups, by the name of the group in the schedule.
    """

    def __init__(self, ranks: int, groups: Mapping[str, Sequence[int]]) -> None:
        self.ranks = ranks
        self._members = {name: tuple(sorted(found)) for name, found in groups.items()}
        cuts = {1, ranks}
        for name, members in self._members.items():
            if not members or members[0] < 0 or members[-1] >= ranks:
                raise RankGridError(f"group {name}: must hold ranks from 0 to {ranks - 1}")
            if len(set(members)) < len(members):
                raise RankGridError(f"group {name}: holds a rank twice")
            for stride, count in _strides(members):
                cuts |= {stride, stride * count}
        edges = sorted(cuts)
        for small, large in pairwise(edges):
            if large % small:
                raise RankGridError(f"groups: are no lines of one grid of {ranks} ranks")
        sizes = [large // small for small, large in pairwise(edges)]
        names = [f"axis{number}" for number in range(len(sizes))]
        axes = [Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)]
        self.mesh = Mesh(axes=tuple(reversed(axes)) or (Axis(name="axis0", size=1),))
        self._strides = dict(zip(names, edges, strict=False))
        self.lines: dict[str, tuple[str, ...]] = {}
        self._line_of = {name: self._line(name, members) for name, members in self._members.items()}

    def _line(self, name: str, members: tuple[int, ...]) -> str:
        """Return the name of the group in the schedule; groups along the same axes share a name."""
        axes = tuple(
            axis.name
            for axis in self.mesh.axes
            if any(
                stride <= self._strides[axis.name] < stride * count
                for stride, count in _strides(members)
            )
        )
        found = Group(name=name, axes=axes).members(self.mesh, self.mesh.coordinates(members[0]))
        if found != members:
            raise RankGridError(f"group {name}: is no line of the grid that the others make")
        if len(members) == self.ranks:
            return WORLD
        line = "+".join(axes) or "alone"
        self.lines[line] = axes
        return line

    def group(self, rank: int, name: object) -> tuple[str, tuple[int, ...]]:
        """Return the group called `name` that `rank` is in, in the schedule, and its ranks.

        Raises:
            RankGridError: there is none of that name, or the rank is not in it.
        """
        if name in ("", "0") and name not in self._members:  # as ASTRA-sim has it
            return WORLD, tuple(range(self.ranks))
        if not isinstance(name, str) or name not in self._members:
            raise RankGridError(f"pg_name: {name!r} is no group; give comm_groups.json")
        members = self._members[name]
        if rank not in members:
            raise RankGridError(f"pg_name: group {name} does not hold the rank")
        return self._line_of[name], members

    def size(self, group: str) -> int:
        """Return the ranks of a communicator of a group of the schedule."""
        if group == WORLD:
            return self.ranks
        return prod(self.mesh.axis_size(axis) for axis in self.lines[group])


@cache
def _strides(members: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return distance and number of ranks along each axis of a group, the nearest first."""
    if len(members) == 1:
        return ()
    stride, count = members[1] - members[0], 2
    while count < len(members) and members[count] - members[count - 1] == stride:
        count += 1
    return ((stride, count), *_strides(members[::count]))
