"""Whether a schedule can be read at all: names exist, views fit their buffers, sizes agree.

Raises on the first fault, with its path. Whether the schedule is right is `zsim.check`.
"""

from typing import assert_never

from zsim.access import COMPUTE_ACCESS
from zsim.dtype import DType
from zsim.mesh import Mesh
from zsim.operation import (
    AllGather,
    Allocate,
    AllReduce,
    Branch,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    HostWait,
    Operation,
    Previous,
    Receive,
    ReduceScatter,
    Send,
    SetScalar,
    Together,
    View,
    walk,
)
from zsim.schedule import Program, Schedule, ScheduleError


def inspect(schedule: Schedule) -> None:
    """Return if `schedule` is well formed.

    Raises:
        ScheduleError: it is not; the message names where and what is allowed.
    """
    _names_differ("group", [group.name for group in schedule.groups])
    _names_differ("layout", [layout.name for layout in schedule.layouts])
    _names_differ("stream", list(schedule.streams))
    _names_differ("scalar", [scalar.name for scalar in schedule.scalars])
    _names_differ("pool", [pool.name for pool in schedule.pools])
    _inspect_roles(schedule)
    for group in schedule.groups:
        group.size(schedule.mesh)
    for layout in schedule.layouts:
        if layout.axis is not None:
            layout.segment(0, schedule.mesh.axis_size(layout.axis))
    for program in schedule.programs:
        _Inspector(schedule, program).inspect()


def _names_differ(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ScheduleError(f"{what} {name}: the name is used twice")


def _inspect_roles(schedule: Schedule) -> None:
    mesh = schedule.mesh
    names = [role.name for role in schedule.roles]
    if sorted(names) != sorted(program.role for program in schedule.programs):
        raise ScheduleError(f"programs: one for each role is needed, roles are {', '.join(names)}")
    _names_differ("role", names)
    boxes = [(role.name, box) for role in schedule.roles for box in role.boxes]
    for index, (name, box) in enumerate(boxes):
        for other_name, other in boxes[:index]:
            if mesh.boxes_meet(box, other):
                raise ScheduleError(f"role {name}: shares ranks with role {other_name}")
    covered = sum(role.size(mesh) for role in schedule.roles)
    if covered != mesh.size:
        raise ScheduleError(f"roles: cover {covered} ranks of {mesh.size}")


class _Inspector:
    """Walks one program, with the names that it may use at hand."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.schedule = schedule
        self.program = program
        self.mesh: Mesh = schedule.mesh
        self.streams = set(schedule.streams)
        self.scalars = {scalar.name for scalar in schedule.scalars}
        self.sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self.good_views: set[View] = set()

    def inspect(self) -> None:
        """Raise on the first fault of the program."""
        self._inspect_buffers()
        setup = {operation.id for operation in walk(self.program.setup)}
        for part in (self.program.setup, self.program.step):
            for operation in walk(part):
                self._inspect_operation(operation, part is self.program.step, setup)

    def _inspect_buffers(self) -> None:
        pools = {pool.name for pool in self.schedule.pools}
        for buffer in self.program.buffers:
            where = f"{self.program.role}/buffer {buffer.name}"
            if buffer.pool not in pools:
                raise ScheduleError(f"{where}: no pool {buffer.pool!r}; pools are {sorted(pools)}")
            if buffer.home not in self.streams:
                raise ScheduleError(f"{where}: no stream {buffer.home!r}")
            if buffer.layout is None:
                if buffer.shard is not None:
                    raise ScheduleError(f"{where}: shard without a layout")
                continue
            layout = self.schedule.layout_by_name.get(buffer.layout)
            if layout is None:
                raise ScheduleError(f"{where}: no layout {buffer.layout!r}")
            if buffer.shard is not None and buffer.shard != layout.axis:
                raise ScheduleError(
                    f"{where}: shard {buffer.shard!r}, but the layout is cut along {layout.axis!r}"
                )
            needed = layout.elements
            if buffer.shard is not None:
                count = self.mesh.axis_size(buffer.shard)
                needed = (
                    max(layout.segment(index, count)[1] for index in range(count))
                    if (layout.cuts)
                    else layout.segment(0, count)[1]
                )
            if buffer.elements != needed:
                raise ScheduleError(f"{where}: {buffer.elements} elements, its layout has {needed}")
        for name in self.program.persistent:
            if name not in self.program.by_name:
                raise ScheduleError(f"{self.program.role}/persistent: no buffer {name!r}")

    def _inspect_operation(self, operation: Operation, in_step: bool, setup: set[str]) -> None:
        where = operation.id
        match operation:
            case Allocate(buffer=buffer):
                self._need_buffer(where, buffer)
            case Free(buffer=buffer, uses=uses):
                self._need_buffer(where, buffer)
                self._inspect_edges(where, uses, in_step, setup)
            case HostWait(operation=edge):
                self._inspect_edges(where, (edge,), in_step, setup)
            case SetScalar(scalar=scalar, counter=counter, every=every):
                self._need_scalar(where, scalar)
                if counter is not None:
                    self._need_scalar(where, counter)
                if every < 1:
                    raise ScheduleError(f"{where}: every {every} must be at least 1")
            case Branch(value=value, after=after):
                self._inspect_edges(where, after, in_step, setup)
                self._inspect_view(where, value)
                if value.size != 1:
                    raise ScheduleError(f"{where}: a branch reads 1 element, not {value.size}")
            case Compute():
                self._inspect_compute(operation)
            case Fill(target=target, scalar=scalar):
                self._inspect_view(where, target)
                if scalar is not None:
                    self._need_scalar(where, scalar)
            case Copy(source=source, target=target):
                self._inspect_view(where, source)
                self._inspect_view(where, target)
                if source.size != target.size:
                    raise ScheduleError(f"{where}: copies {source.size} elements to {target.size}")
            case Together(members=members):
                for member in members:
                    self._inspect_communication(member)
            case AllGather() | ReduceScatter() | AllReduce() | Broadcast() | Send() | Receive():
                self._inspect_communication(operation)
            case _:
                assert_never(operation)
        if not isinstance(operation, Allocate | Free | HostWait | SetScalar | Branch):
            if operation.stream not in self.streams:
                raise ScheduleError(f"{where}: no stream {operation.stream!r}")
            self._inspect_edges(where, operation.after, in_step, setup)

    def _inspect_edges(
        self, where: str, edges: tuple[Edge, ...], in_step: bool, setup: set[str]
    ) -> None:
        for edge in edges:
            name = edge.operation if isinstance(edge, Previous) else edge
            if isinstance(edge, Previous) and not in_step:
                raise ScheduleError(f"{where}: setup has no previous {name!r}")
            if name not in self.program.by_id:
                raise ScheduleError(f"{where}: after {name!r}, which is no operation")
            if not isinstance(edge, Previous) and (name in setup) is in_step:
                part = "setup" if in_step else "the step"
                raise ScheduleError(f"{where}: after {name!r}, which is in {part}")

    def _inspect_compute(self, compute: Compute) -> None:
        table = COMPUTE_ACCESS[compute.action]
        for operand in compute.operands:
            if operand.role not in table:
                allowed = ", ".join(role.value for role in table)
                raise ScheduleError(
                    f"{compute.id}: {compute.action} has no operand {operand.role}; it has {allowed}"
                )
            for axis in operand.partial:
                self.mesh.axis_size(axis)
            self._inspect_view(compute.id, operand.view)
        for scalar in compute.scalars:
            self._need_scalar(compute.id, scalar)

    def _inspect_communication(self, operation: Communication) -> None:
        where = operation.id
        if operation.group not in self.sizes:
            raise ScheduleError(f"{where}: no group {operation.group!r}")
        count = self.sizes[operation.group]
        match operation:
            case AllGather(source=source, target=target):
                self._need_sizes(where, target, count * source.size)
                views = (source, target)
            case ReduceScatter(source=source, target=target):
                self._need_sizes(where, source, count * target.size)
                views = (source, target)
            case AllReduce(source=source, target=target) | Broadcast(source=source, target=target):
                self._need_sizes(where, target, source.size)
                views = (source, target)
            case Send(source=source):
                views = (source,)
            case Receive(target=target):
                views = (target,)
            case _:
                assert_never(operation)
        if isinstance(operation, Broadcast) and not 0 <= operation.root < count:
            raise ScheduleError(f"{where}: root {operation.root} is outside 0 to {count - 1}")
        for view in views:
            self._inspect_view(where, view)
            if view.layout is not None:
                raise ScheduleError(f"{where}: a collective needs equal sizes on all ranks")
            dtype: DType = self.program.by_name[view.buffer].dtype
            if dtype is not operation.wire:
                raise ScheduleError(
                    f"{where}: wire dtype {operation.wire}, but {view.buffer} is {dtype}"
                )

    def _need_sizes(self, where: str, view: View, needed: int) -> None:
        if view.size != needed:
            raise ScheduleError(f"{where}: {view.buffer} has {view.size} elements, not {needed}")

    def _inspect_view(self, where: str, view: View) -> None:
        if view in self.good_views:
            return
        self._need_buffer(where, view.buffer)
        buffer = self.program.by_name[view.buffer]
        if view.layout is not None:
            layout = self.schedule.layout_by_name.get(view.layout)
            if layout is None or layout.axis is None:
                raise ScheduleError(f"{where}: no layout {view.layout!r} that is cut along an axis")
            if view.start + view.size > layout.elements or buffer.layout != view.layout:
                raise ScheduleError(f"{where}: the window leaves layout {view.layout}")
        else:
            count = 1 if view.axis is None else self.mesh.axis_size(view.axis)
            end = view.start + count * view.size
            if end > buffer.elements:
                raise ScheduleError(
                    f"{where}: view of {view.buffer} ends at {end}, past {buffer.elements} elements"
                )
        self.good_views.add(view)

    def _need_buffer(self, where: str, name: str) -> None:
        if name not in self.program.by_name:
            raise ScheduleError(f"{where}: no buffer {name!r}")

    def _need_scalar(self, where: str, name: str) -> None:
        if name not in self.scalars:
            raise ScheduleError(f"{where}: no scalar {name!r}")
