"""Which ranks stand for others: those that no view, layout, role or root tells apart.

Along an axis a coordinate stands for its neighbours if nothing begins or ends between them: no part
of a tensor, no role, no group. Where something begins or ends inside a rank's own part, that rank
is alone. The first three and the last are alone, too, so that neighbours and ends are told apart.
Ranks that stand for others have data of their own; what a sum needs of the others is its weight.
"""

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise

from zsim.access import accesses
from zsim.check.execution.grid import Along, sending_axes
from zsim.layout import Layout
from zsim.operation import Allocate, Broadcast, Free, Operation, Together, walk
from zsim.schedule import Schedule

FULL = 8
"""Axes of so many ranks are run in full."""


def tracked(schedule: Schedule) -> dict[str, Along]:
    """Return the coordinates to run along each axis, with weights."""
    mesh = schedule.mesh
    large = {
        axis.name: axis.size
        for axis in mesh.axes
        if axis.size > FULL and axis.name not in sending_axes(schedule)
    }
    marks = _Marks(schedule)
    if large:
        marks.collect()
    found: dict[str, Along] = {}
    for axis in mesh.axes:
        if axis.name not in large:
            ranks = tuple(range(axis.size))
            found[axis.name] = Along(axis.name, ranks, (1,) * axis.size)
        else:
            found[axis.name] = _classes(axis.name, axis.size, marks)
    return found


def _classes(name: str, size: int, marks: "_Marks") -> Along:
    alone = {0, 1, 2, size - 1} | {each for each in marks.alone[name] if 0 <= each < size}
    cuts = {0, size} | {each for each in marks.cuts[name] if 0 < each < size}
    for each in alone:
        cuts |= {each, each + 1}
    classes = [(low, high - low) for low, high in pairwise(sorted(cuts))]
    return Along(name, tuple(low for low, _ in classes), tuple(count for _, count in classes))


class _Marks:
    """Coordinates of each single axis that are alone, and those before which a class ends."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.mesh = schedule.mesh
        self.alone: dict[str, set[int]] = defaultdict(set)
        self.cuts: dict[str, set[int]] = defaultdict(set)

    def collect(self) -> None:
        """Go through roles, groups, layouts and views."""
        schedule = self.schedule
        boxes = [box for role in schedule.roles for box in role.boxes]
        boxes += [group.where for group in schedule.groups]
        for box in boxes:
            for span in box:
                self.cuts[span.axis] |= {span.start, span.end}
                self.alone[span.axis] |= {span.start, span.end - 1}
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
        """Return where views of whole tensors begin and end, by layout."""
        found: dict[str, set[int]] = defaultdict(set)
        for program in self.schedule.programs:
            for part in (program.setup, program.step):
                for operation in walk(part):
                    if isinstance(operation, Allocate | Free):
                        continue
                    self._root(operation)
                    for access in accesses(operation):
                        view = access.view
                        if view.layout is not None:
                            found[view.layout] |= {view.start, view.start + view.size}
                            continue
                        buffer = program.by_name[view.buffer]
                        whole = buffer.layout is not None and buffer.shard is None
                        if whole and view.axis is None and view.size != buffer.elements:
                            assert buffer.layout is not None
                            found[buffer.layout] |= {view.start, view.start + view.size}
        return found

    def _root(self, operation: Operation) -> None:
        members = operation.members if isinstance(operation, Together) else (operation,)
        for member in members:
            if isinstance(member, Broadcast):
                group = self.schedule.group_by_name[member.group]
                limits = self.mesh.limits(group.where)
                left = member.root
                for axis in reversed(self.mesh.axes):
                    if axis.name in group.axes:
                        left, place = divmod(left, len(limits[axis.name]))
                        self.alone[axis.name].add(limits[axis.name].start + place)

    def _layout(self, layout: Layout, bounds: set[int]) -> None:
        """Mark the ranks in whose part something begins or ends."""
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
