"""Parts of neighbouring ranks that can be run as one, and the buffers that hold such parts.

If every operation takes a rank's own part of a tensor whole, or as a window on the tensor, it
treats the parts of neighbours equally, element by element. Then one rank can be run that holds the
parts of all of them. A buffer without a layout holds a part, too, if a whole part is copied or
scattered into it, or gathered from it: it is treated as if it had the layout.
"""

from zsim.schedule.access import accesses
from zsim.schedule.operation import Action, CollectiveOperation, Compute, Copy, Operation, View
from zsim.schedule.schedule import Program, Schedule

Part = tuple[str, str]
"""A layout, and the axis along which a rank has a part of it."""

Adopted = dict[tuple[str, str], Part]
"""The part that a buffer without a layout holds, by role and buffer."""


def adopted(schedule: Schedule, axes: frozenset[str]) -> Adopted | None:
    """Return the buffers that hold parts along `axes`; None if these cannot be run as one."""
    mesh = schedule.mesh
    if any(axes & set(joined.axes) for joined in schedule.mesh.joined):
        return None
    for layout in schedule.layouts:
        if layout.axis is not None and layout.blocks and axes & set(mesh.parts(layout.axis)):
            return None
    found: Adopted = {}
    for program in schedule.programs:
        parts = _Parts(schedule, program, axes).find()
        if parts is None:
            return None
        found.update({(program.role, name): part for name, part in parts.items()})
    return found


class _Parts:
    """The buffers of one program that hold parts."""

    def __init__(self, schedule: Schedule, program: Program, axes: frozenset[str]) -> None:
        self.schedule = schedule
        self.program = program
        self.axes = axes
        self.parts: dict[str, Part] = {
            buffer.name: (buffer.layout, buffer.shard)
            for buffer in program.buffers
            if buffer.layout is not None and buffer.shard in axes
        }
        self.fits = True
        self.same: dict[tuple[int, int], tuple[View, View]] = {}
        self.gathered: dict[tuple[int, int, str], tuple[View, View, str]] = {}
        self.views: dict[int, View] = {}
        for operation in program.patterns:
            self._look(operation)

    def find(self) -> dict[str, Part] | None:
        """Return the parts that buffers without a layout hold; None if an operation cuts a part."""
        known = -1
        while known != len(self.parts) and self.fits:
            known = len(self.parts)
            for one, other in self.same.values():
                self._agree(one, other)
            for part, whole, group in self.gathered.values():
                self._gather(part, whole, group)
        whole_views = (
            view.buffer not in self.parts or view.layout is not None or self._is_whole(view)
            for view in self.views.values()
        )
        if not self.fits or not all(whole_views):
            return None
        declared = self.program.by_name
        return {name: part for name, part in self.parts.items() if declared[name].layout is None}

    def _look(self, operation: Operation) -> None:
        """Record the views that an operation treats as equal, or gathers from each other."""
        self.views.update((id(access.view), access.view) for access in accesses(operation))
        match operation:
            case Copy(source=source, target=target, by_parameter=False):
                self.same[id(source), id(target)] = source, target
            case Compute(action=Action.UPDATE, operands=(first, *others)):
                for each in others:
                    self.same[id(first.view), id(each.view)] = first.view, each.view
            case CollectiveOperation(part=View() as part, whole=whole, group=group):
                self.gathered[id(part), id(whole), group] = part, whole, group
            case _:
                pass

    def _is_whole(self, view: View) -> bool:
        buffer = self.program.by_name[view.buffer]
        return view.axis is None and view.layout is None and view.size == buffer.elements

    def _agree(self, one: View, other: View) -> None:
        """Record that two views correspond: if one is a part, so is the other."""
        for view, like in ((one, other), (other, one)):
            part = self._part(like)
            if part is not None:
                self._adopt(view, part)

    def _part(self, view: View) -> Part | None:
        """Return the layout and axis of which a view is a whole part; None if it is not."""
        if view.buffer in self.parts:
            return self.parts[view.buffer] if self._is_whole(view) else None
        layout = self.program.by_name[view.buffer].layout
        if layout is not None and view.axis is not None and view.axis in self.axes:
            named = self.schedule.layout_by_name[layout]
            count = self.schedule.mesh.axis_size(view.axis)
            if named.axis == view.axis and not named.cuts and view.size * count == named.elements:
                return layout, view.axis
        return None

    def _gather(self, part: View, whole: View, group: str) -> None:
        layout = self.program.by_name[whole.buffer].layout
        axes = self.schedule.group_by_name[group].axes
        if layout is None or not self._is_whole(whole) or len(axes) != 1:
            return
        named = self.schedule.layout_by_name[layout]
        if axes[0] in self.axes and named.axis == axes[0] and named.elements == whole.size:
            self._adopt(part, (layout, axes[0]))

    def _adopt(self, view: View, part: Part) -> None:
        """Record that the buffer of a view holds a part."""
        buffer = self.program.by_name[view.buffer]
        if buffer.layout is not None or view.axis is not None or view.layout is not None:
            return
        known = self.parts.get(view.buffer)
        if not self._is_whole(view) or (known is not None and known != part):
            self.fits = self.fits and known == part
            return
        layout = self.schedule.layout_by_name[part[0]]
        if layout.cuts is None and layout.axis == part[1]:
            count = self.schedule.mesh.axis_size(part[1])
            if buffer.elements * count == layout.elements:
                self.parts[view.buffer] = part
                return
        self.fits = False
