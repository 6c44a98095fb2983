"""A test for two views of a buffer that share an element on some rank.

A view can depend on the rank: the own part along an axis, or the part of a window in the rank's
segment of a layout. The test does not iterate over ranks. The own parts of two views are compared
by two inequalities in the coordinate; of segments, only those matter that contain the start or end
of a window or are covered by it. If two views depend on the rank in different manners, the test
compares the union over ranks of each; for two axes that is exact, since coordinates are
independent.
"""

from bisect import bisect_right
from itertools import pairwise

from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Group, Mesh
from zsim.schedule.operation import View
from zsim.schedule.schedule import Schedule

Span = tuple[int, int]
"""First element and end (exclusive)."""


def describe_view(view: View) -> str:
    """Return a description of the elements of a view."""
    if view.axis is not None:
        return f"the rank's own {view.size} elements along {view.axis} from {view.start} on"
    which = f"elements {view.start} to {view.start + view.size}"
    return f"what the rank has of {which} of {view.layout}" if view.layout is not None else which


class Overlap:
    """Tests overlap for the views of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.mesh: Mesh = schedule.mesh
        self.layouts = schedule.layout_by_name
        self._sizes: dict[str, int] = {}
        self._known: dict[View, list[Span]] = {}

    def ranks(self, axis: str) -> int:
        """Return the number of ranks along `axis`."""
        if axis not in self._sizes:
            self._sizes[axis] = self.mesh.axis_size(axis)
        return self._sizes[axis]

    def meet(self, one: View, other: View) -> bool:
        """Return True if some rank has an element that is in both views of one buffer."""
        if not one.size or not other.size:
            return False
        (low, high), (start, end) = self.hull(one), self.hull(other)
        if high <= start or end <= low:
            return False
        if one.layout is None and other.layout is None:
            return self._own_parts_meet(one, other)
        if one.layout == other.layout:
            if _frame(one) != _frame(other):
                return True
            return max(one.start, other.start) < min(one.start + one.size, other.start + other.size)
        window, plain = (one, other) if other.layout is None else (other, one)
        if plain.layout is not None or plain.axis is not None or window.origin is not None:
            return True
        return any(
            max(low, plain.start) < min(high, plain.start + plain.size)
            for low, high in self._parts(window)
        )

    def hull(self, view: View) -> Span:
        """Return the first and the end of the elements of `view` over all ranks."""
        if view.axis is not None:
            return view.start, view.start + self.ranks(view.axis) * view.size
        if view.layout is None:
            return view.start, view.start + view.size
        if view.origin is not None:
            return view.origin, view.origin + view.size
        parts = self._parts(view)
        return min((low for low, _ in parts), default=0), max((h for _, h in parts), default=0)

    def _parts(self, window: View) -> list[Span]:
        """Return the parts of a window in segments, relative to each segment: one of each class."""
        found = self._known.get(window)
        if found is None:
            assert window.layout is not None
            layout = self.layouts[window.layout]
            assert layout.axis is not None
            count, end = self.ranks(layout.axis), window.start + window.size
            if layout.blocks is None:
                found = _parts(_cuts(layout, count), window.start, end)
            else:
                found = [
                    (low + start // count, high + start // count)
                    for start, stop in pairwise((*layout.blocks, layout.elements))
                    for low, high in _parts(
                        _even(stop - start, count), max(window.start - start, 0), end - start
                    )
                ]
            self._known[window] = found
        return found

    def _own_parts_meet(self, one: View, other: View) -> bool:
        """Return True if own parts, whose hulls meet, meet at some coordinate."""
        if one.axis is None and other.axis is None:
            return True
        if one.axis is not None and other.axis is not None and one.axis != other.axis:
            return True
        step = one.size if one.axis is not None else 0
        other_step = other.size if other.axis is not None else 0
        axis = one.axis or other.axis
        assert axis is not None
        # one.start + c * step < other.start + c * other_step + other.size, and the reverse.
        slope = step - other_step
        above = other.start + other.size - one.start
        below = other.start - one.start - one.size
        if slope < 0:
            slope, above, below = -slope, -below, -above
        if slope == 0:
            return below < 0 < above
        first = max(0, below // slope + 1)
        last = min(self.ranks(axis) - 1, -(-above // slope) - 1)
        return first <= last

    def is_own_slot(self, part: View, whole: View, group: Group) -> bool:
        """Return True if `part` is, on every rank, its slot of `whole` by its place in the group.

        Then a gather or a reduce-scatter works in place.
        """
        if part.layout is not None or whole.layout is not None or whole.axis is not None:
            return False
        if part.start != whole.start:
            return False
        varies = {axis for axis in group.axes if self.ranks(axis) > 1}
        parts = self.mesh.parts(part.axis) if part.axis is not None else ()
        if {axis for axis in parts if self.ranks(axis) > 1} != varies:
            return False
        limits = self.mesh.limits(group.where)
        return all(len(limits[axis]) == self.ranks(axis) for axis in varies)


def _frame(window: View) -> int | None:
    """Return a key that differs for windows of a layout at different places of a buffer."""
    return None if window.origin is None else window.origin - window.start


def _parts(cuts: "tuple[int, ...] | range", start: int, end: int) -> list[Span]:
    """Return the parts of [start, end) in segments with these cuts, relative to each segment."""
    start, end = max(start, cuts[0]), min(end, cuts[-1])
    found: list[Span] = []
    if start >= end:
        return found
    first, last = bisect_right(cuts, start) - 1, bisect_right(cuts, end - 1) - 1
    found.append((start - cuts[first], min(end, cuts[first + 1]) - cuts[first]))
    if last > first:
        widest = max((cuts[i + 1] - cuts[i] for i in range(first + 1, last)), default=0)
        found.append((0, max(widest, end - cuts[last])))
    return found


def _cuts(layout: Layout, count: int) -> "tuple[int, ...] | range":
    """Return the starts of segments, and the end of the last one."""
    return _even(layout.elements, count) if layout.cuts is None else layout.cuts


def _even(elements: int, count: int) -> "tuple[int, ...] | range":
    """Return the starts of equal segments, and the end of the last one."""
    size = elements // count
    return range(0, elements + 1, size) if size else (0,) * (count + 1)
