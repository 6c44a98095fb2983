"""Classes of ranks that roles and groups do not distinguish, and the communicators they form.

Every axis is cut at the ends of all boxes of roles and groups; a class is a box of the resulting
grid. All ranks of a class run one program and belong to the same groups. Communicators of a group
form classes, too: those of one class have members of the same classes of ranks. The number of
classes depends on the boxes that the schedule names, not on the number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from zsim.schedule.mesh import Group, Mesh
from zsim.schedule.schedule import Schedule

Interval = tuple[int, int]
"""Start and end (exclusive)."""


@dataclass(frozen=True, slots=True)
class RankBox:
    """The ranks of a class: within one interval along each axis of the mesh, all of one role."""

    role: str
    limits: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class EqualCommunicators:
    """Communicators of a group that consist of the same classes of ranks.

    `members` has, for each class, the intervals of its ranks' indexes in the communicator. One
    role may have several classes, and one class several intervals.
    """

    group: Group
    count: int
    members: tuple[tuple[RankBox, tuple[Interval, ...]], ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the members, each once."""
        return tuple(dict.fromkeys(rank_class.role for rank_class, _ in self.members))

    def intervals(self, role: str) -> list[Interval]:
        """Return the indexes of the members with `role`."""
        return [
            each for rank_class, found in self.members if rank_class.role == role for each in found
        ]


def rank_classes(schedule: Schedule, alone: frozenset[str] = frozenset()) -> list[RankBox]:
    """Return the classes of the mesh; along the axes `alone` each has one coordinate."""
    mesh = schedule.mesh
    boxes = [box for role in schedule.roles for box in role.boxes]
    boxes += [group.where for group in schedule.groups]
    intervals: list[list[Interval]] = []
    for axis in mesh.axes:
        cuts = {0, axis.size}
        if axis.name in alone:
            cuts = set(range(axis.size + 1))
        for box in boxes:
            for span in box:
                if span.axis == axis.name:
                    cuts |= {span.start, span.end}
                    if span.step > 1:
                        cuts |= {cut for each in span.coordinates for cut in (each, each + 1)}
        intervals.append(list(pairwise(sorted(cuts))))
    found: list[RankBox] = []
    for limits in product(*intervals):
        corner = {axis.name: low for axis, (low, _) in zip(mesh.axes, limits, strict=True)}
        role = next(role for role in schedule.roles if role.holds(mesh, corner))
        found.append(RankBox(role.name, limits))
    return found


def communicators(mesh: Mesh, group: Group, among: list[RankBox]) -> list[EqualCommunicators]:
    """Return the classes of communicators of `group`, made of the classes `among`."""
    limits = list(mesh.limits(group.where).values())
    varies = [axis.name in group.axes for axis in mesh.axes]
    classes: dict[tuple[Interval, ...], list[tuple[RankBox, tuple[Interval, ...]]]] = {}
    for rank_class in among:
        if not _inside(rank_class, limits):
            continue
        key = tuple(
            each for each, along in zip(rank_class.limits, varies, strict=True) if not along
        )
        spans = [
            ((limit.index(low), limit.index(high - 1) + 1), len(limit))
            for (low, high), limit, along in zip(rank_class.limits, limits, varies, strict=True)
            if along
        ]
        classes.setdefault(key, []).append((rank_class, tuple(_indexes(spans))))
    count = group.size(mesh)
    return [EqualCommunicators(group, count, tuple(members)) for members in classes.values()]


def outside(mesh: Mesh, group: Group, among: list[RankBox]) -> list[RankBox]:
    """Return classes whose ranks belong to no communicator of `group`."""
    limits = list(mesh.limits(group.where).values())
    return [rank_class for rank_class in among if not _inside(rank_class, limits)]


def _inside(rank_class: RankBox, limits: list[range]) -> bool:
    return all(
        low in limit and high - 1 in limit
        for (low, high), limit in zip(rank_class.limits, limits, strict=True)
    )


def _indexes(spans: list[tuple[Interval, int]]) -> Iterator[Interval]:
    """Yield intervals of the positions of a box in a grid whose last axis varies fastest."""
    if not spans:
        yield 0, 1
        return
    (low, high), _ = spans[0]
    inner = 1
    for _, size in spans[1:]:
        inner *= size
    if all(span == (0, size) for span, size in spans[1:]):
        yield low * inner, high * inner
        return
    for outer in range(low, high):
        for first, last in _indexes(spans[1:]):
            yield outer * inner + first, outer * inner + last
