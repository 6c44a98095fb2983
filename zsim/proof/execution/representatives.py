"""Classes of ranks that views, layouts, roles and roots do not distinguish; one rank each is run.

Along an axis a coordinate represents its neighbours if nothing starts or ends between them: no
role, no group and, unless their parts can be run as one (`unions`), no part of a tensor. A rank is
in a class of its own if something starts or ends inside its part. So are the first and the last
rank. Ranks that represent others have data of their own; a sum counts them once for each rank that
they represent.
"""

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from math import prod

from zsim.proof.execution.grid import Along, exchanging_axes, sending_axes
from zsim.proof.execution.unions import Adopted, adopted
from zsim.schedule.access import accesses
from zsim.schedule.layout import Layout
from zsim.schedule.operation import (
    Communication,
)
from zsim.schedule.schedule import Schedule

FULL = 4
"""Axes of up to this number of ranks are run in full."""


def tracked(schedule: Schedule) -> tuple[dict[str, Along], Adopted]:
    """Return the coordinates to run along each axis, and the buffers that hold parts of tensors."""
    mesh = schedule.mesh
    full = sending_axes(schedule) | exchanging_axes(schedule)
    large = {
        axis.name: axis.size for axis in mesh.axes if axis.size > FULL and axis.name not in full
    }
    cut = {
        part
        for layout in schedule.layouts
        if layout.axis is not None
        for part in mesh.parts(layout.axis)
    }
    unions = frozenset(large.keys() & cut)
    parts = adopted(schedule, unions) if unions else {}
    marks = _Marks(schedule)
    if large:
        marks.collect(layouts=parts is None)
    found: dict[str, Along] = {}
    for axis in mesh.axes:
        if axis.name not in large:
            ranks = tuple(range(axis.size))
            found[axis.name] = Along(axis.name, ranks, (1,) * axis.size)
        else:
            as_one = parts is not None and axis.name in unions
            found[axis.name] = _classes(axis.name, axis.size, marks, as_one=as_one)
    return found, parts or {}


def _classes(name: str, size: int, marks: "_Marks", *, as_one: bool) -> Along:
    alone = {0, size - 1} | {each for each in marks.alone[name] if 0 <= each < size}
    cuts = {0, size} | {each for each in marks.cuts[name] if 0 < each < size}
    for each in alone:
        cuts |= {each, each + 1}
    classes = [(low, high - low) for low, high in pairwise(sorted(cuts))]
    coordinates, weights = zip(*classes, strict=True)
    return Along(name, coordinates, weights, unions=as_one)


class _Marks:
    """Coordinates of each single axis with their own class, and those that start a class."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.mesh = schedule.mesh
        self.alone: dict[str, set[int]] = defaultdict(set)
        self.cuts: dict[str, set[int]] = defaultdict(set)

    def collect(self, *, layouts: bool) -> None:
        """Collect marks of roles, groups, roots and, with `layouts`, of layouts and views."""
        schedule = self.schedule
        boxes = [box for role in schedule.roles for box in role.boxes]
        boxes += [group.where for group in schedule.groups]
        for box in boxes:
            for span in box:
                self.cuts[span.axis] |= {span.start, span.end}
                self.alone[span.axis] |= {span.start, span.end - 1}
                if span.step > 1:
                    self.alone[span.axis] |= set(span.coordinates)
        for program in schedule.programs:
            for operation in program.patterns:
                if isinstance(operation, Communication):
                    self._addressed(operation)
        if not layouts:
            return
        places = self._places()
        seen: set[tuple[object, ...]] = set()
        for layout in schedule.layouts:
            if layout.axis is None:
                continue
            bounds = {place for piece in layout.pieces for place in (piece.start, piece.end)}
            bounds |= places[layout.name]
            key = (layout.axis, layout.elements, layout.cuts, layout.blocks, frozenset(bounds))
            if key not in seen:
                seen.add(key)
                self._layout(layout, bounds)

    def _places(self) -> dict[str, set[int]]:
        """Return the starts and ends of views of whole tensors, by layout."""
        found: dict[str, set[int]] = defaultdict(set)
        for program in self.schedule.programs:
            for operation in program.patterns:
                for view, _, _ in accesses(operation):
                    buffer = program.by_name[view.buffer]
                    cuts = view.axis is None and view.size != buffer.elements
                    name = view.layout or (None if buffer.shard else buffer.layout)
                    if name is not None and (view.layout or cuts):
                        found[name] |= {view.start, view.start + view.size}
        return found

    def _addressed(self, operation: Communication) -> None:
        group = self.schedule.group_by_name[operation.group]
        limits = self.mesh.limits(group.where)
        members = prod(len(limits[name]) for name in group.axes)
        for member in operation.addressed(members):
            left = member
            for axis in reversed(self.mesh.axes):
                if axis.name in group.axes:
                    left, place = divmod(left, len(limits[axis.name]))
                    self.alone[axis.name].add(limits[axis.name][place])

    def _layout(self, layout: Layout, bounds: set[int]) -> None:
        """Mark the ranks in whose part something starts or ends."""
        assert layout.axis is not None
        count = self.mesh.axis_size(layout.axis)
        if layout.cuts is not None:
            for place in bounds:
                rank = bisect_right(layout.cuts, place) - 1
                self._mark(layout.axis, rank, inside=layout.cuts[max(rank, 0)] != place)
            for rank, (low, high) in enumerate(pairwise(layout.cuts)):
                if low == high:
                    self._mark(layout.axis, rank, inside=True)
            return
        blocks = [*(layout.blocks or (0,)), layout.elements]
        for place in bounds:
            block = max(0, min(bisect_right(blocks, place) - 1, len(blocks) - 2))
            size = (blocks[block + 1] - blocks[block]) // count
            for here in {place, min(place, blocks[block + 1])}:
                if size:
                    rank, rest = divmod(here - blocks[block], size)
                    self._mark(layout.axis, rank, inside=bool(rest))

    def _mark(self, axis: str, rank: int, *, inside: bool) -> None:
        parts = self.mesh.parts(axis)
        for part in reversed(parts):
            rank, place = divmod(rank, self.mesh.axis_size(part)) if len(parts) > 1 else (0, rank)
            if inside or len(parts) > 1:
                self.alone[part].add(place)
            else:
                self.cuts[part].add(place)
