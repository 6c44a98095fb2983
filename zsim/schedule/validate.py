"""Check that a schedule is well formed: names exist, views fit their buffers, sizes agree.

Raises on the first fault, with its path. `zsim.proof` checks that the schedule is correct.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

from zsim.model.generator import Draw
from zsim.schedule.access import COMPUTE_ACCESS, recurring
from zsim.schedule.fusions import inspect_fusions
from zsim.schedule.inspect_counts import (
    inspect_blocks,
    inspect_count,
    inspect_exchange,
    inspect_read,
    inspect_rows,
    is_counted,
    need_count,
    need_gathered,
    need_whole,
)
from zsim.schedule.mesh import Group, Mesh
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllToAll,
    Branch,
    Broadcast,
    CollectiveOperation,
    Communication,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    HostWait,
    Operation,
    Previous,
    Read,
    ReadCounts,
    Role,
    SetScalar,
    Together,
    View,
    Write,
    walk,
)
from zsim.schedule.program import (
    Buffer,
    Contract,
    Place,
    Pool,
    Program,
    Scalar,
    ScheduleError,
    UncheckedSchedule,
)
from zsim.schedule.view_bounds import at, inspect_view, ranks_of_all_sizes, window_of
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer


def inspect_update(update: Compute, scalars: Mapping[str, Scalar]) -> None:
    """Raise ScheduleError unless an update has the operands that its rule needs.

    `scalars` are by name.

    Raises:
        ScheduleError: it does not, or its rule is not an optimizer.
    """
    where, rule = update.id, update.rule
    if not isinstance(rule, Optimizer):
        *names, last = (kind.__name__ for kind in Optimizer.kinds() if not kind.of_loads)
        raise ScheduleError(f"{where}: rule {rule} must be {', '.join(names)} or {last}")
    if not (rule.element_wise or rule.of_loads):
        why = "needs whole tensors, and updates are of elements"
        raise ScheduleError(f"{where}: rule {type(rule).__name__} {why}")
    rate = rule.learning_rate
    if isinstance(rate, str) and not (rate in scalars and scalars[rate].given):
        raise ScheduleError(f"{where}: learning rate {rate!r} is no scalar that is given")
    roles = [operand.role for operand in update.operands]
    if (kept := roles.count(Role.MOMENT)) != (needed := rule.moments):
        raise ScheduleError(f"{where}: {kept} moments, {needed} needed by its rule")
    if roles.count(Role.MASTER) + roles.count(Role.PARAMETER) != 1:
        raise ScheduleError(f"{where}: one operand, master or parameter, is updated")
    if roles.count(Role.GRADIENT) != 1:
        raise ScheduleError(f"{where}: one gradient operand is needed")
    sizes = sorted({operand.view.size for operand in update.operands})
    if len(sizes) != 1:
        raise ScheduleError(f"{where}: operands of one size are needed, they have {sizes}")
    if len({window_of(operand.view) for operand in update.operands}) > 1:
        raise ScheduleError(f"{where}: operands are not one window on one layout")


def need_numbers(compute: Compute, role: Role, count: int) -> None:
    """Raise ScheduleError unless `compute` has one operand of `role`, of `count` elements.

    Raises:
        ScheduleError: it does not.
    """
    sizes = [operand.view.size for operand in compute.operands if operand.role is role]
    if sizes != [count]:
        needed = f"{count} element{'s' * (count != 1)} is needed"
        raise ScheduleError(f"{compute.id}: one {role} of {needed}, got {sizes}")


def inspect_change(change: SetScalar) -> None:
    """Raise ScheduleError unless a change of a scalar can be carried out.

    Raises:
        ScheduleError: `every` is below 1, or `minimum` is above `maximum`.
    """
    if change.every < 1:
        raise ScheduleError(f"{change.id}: every {change.every} must be at least 1")
    if change.minimum > change.maximum:
        raise ScheduleError(
            f"{change.id}: minimum {change.minimum} is above maximum {change.maximum}"
        )


def inspect_decision(branch: Branch) -> None:
    """Raise ScheduleError unless a branch decides on one number.

    Raises:
        ScheduleError: it reads neither or both of value and scalar, or several elements.
    """
    if (branch.value is None) is (branch.scalar is None):
        raise ScheduleError(f"{branch.id}: a branch reads either a value or a scalar")
    if branch.value is not None and branch.value.size != 1:
        raise ScheduleError(f"{branch.id}: a branch reads 1 element, not {branch.value.size}")


def inspect_slots(pool: Pool) -> None:
    """Raise ScheduleError unless a pool of slots has a whole number of non-empty slots.

    Raises:
        ScheduleError: it does not, or a slot has no bytes.
    """
    if pool.slot_bytes is None:
        return
    if pool.slot_bytes < 1:
        raise ScheduleError(f"pool {pool.name}: slot_bytes {pool.slot_bytes} must be at least 1")
    if not pool.capacity_bytes or pool.capacity_bytes % pool.slot_bytes:
        raise ScheduleError(
            f"pool {pool.name}: capacity_bytes {pool.capacity_bytes} must be a number of slots of "
            f"{pool.slot_bytes} bytes"
        )


def inspect_place(where: str, buffer: Buffer, pool: Pool) -> None:
    """Raise ScheduleError unless `pool` can hold a buffer.

    Raises:
        ScheduleError: the buffer does not have the size of a slot, or is produced in a file.
    """
    if pool.slot_bytes is not None and pool.slot_bytes != buffer.size_bytes:
        raise ScheduleError(
            f"{where}: {buffer.size_bytes} bytes, but a slot of pool {pool.name} has "
            f"{pool.slot_bytes}"
        )
    if buffer.produced and pool.place is Place.NVME:
        raise ScheduleError(f"{where}: autograd produces nothing in a file")


def inspect_file_transfer(
    transfer: Read | Write, by_name: Mapping[str, Buffer], pools: Mapping[str, Pool]
) -> None:
    """Raise ScheduleError unless a `Read` is from NVMe to memory and a `Write` the reverse.

    Raises:
        ScheduleError: it is not, or source and target differ in format.
    """
    source, target = (by_name[each.buffer] for each in (transfer.source, transfer.target))
    if source.dtype is not target.dtype:
        raise ScheduleError(f"{transfer.id}: reads {source.dtype}, and writes {target.dtype}")
    places = [pools[each.pool].place for each in (source, target)]
    on_file = [place is Place.NVME for place in places]
    if on_file != [isinstance(transfer, Read), isinstance(transfer, Write)]:
        raise ScheduleError(
            f"{transfer.id}: a {type(transfer).__name__} from {places[0]} to {places[1]}; a Read "
            "is from nvme to device or host, a Write the other way"
        )


def inspect(schedule: UncheckedSchedule) -> None:
    """Raise ScheduleError unless `schedule` is well formed.

    Raises:
        ScheduleError: it is not; the message names the place and the allowed values.
    """
    _names_differ("group", [group.name for group in schedule.groups])
    _names_differ("layout", [layout.name for layout in schedule.layouts])
    _names_differ("stream", schedule.streams)
    _names_differ("scalar", [scalar.name for scalar in schedule.scalars])
    _names_differ("generator", [generator.name for generator in schedule.generators])
    _names_differ("pool", [pool.name for pool in schedule.pools])
    _names_differ("host_threads", schedule.host_threads)
    if unknown := set(schedule.host_threads) - set(schedule.streams):
        raise ScheduleError(f"host_threads: no stream {min(unknown)!r}")
    for pool in schedule.pools:
        inspect_slots(pool)
    _inspect_roles(schedule)
    for group in schedule.groups:
        _inspect_group(schedule.mesh, group)
    for generator in schedule.generators:
        _inspect_axes(schedule.mesh, f"generator {generator.name}", generator.axes)
    _names_differ("count", [count.name for count in schedule.counts])
    for count in schedule.counts:
        inspect_count(schedule.mesh, schedule.group_by_name, count)
    for layout in schedule.layouts:
        if layout.axis is not None:
            with at(f"layout {layout.name}"):
                layout.segment(0, schedule.mesh.axis_size(layout.axis))
    for program in schedule.programs:
        _Inspector(schedule, program).inspect()
        inspect_fusions(program)
    _inspect_contract(schedule)


def _names_differ(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScheduleError(f"{what} {name}: the name is used twice")
        seen.add(name)


def _inspect_group(mesh: Mesh, group: Group) -> None:
    where = f"group {group.name}"
    with at(where):
        mesh.limits(group.where)
    _inspect_axes(mesh, where, group.axes)


def _inspect_axes(mesh: Mesh, where: str, axes: tuple[str, ...]) -> None:
    with at(where):
        for axis in axes:
            if mesh.parts(axis) != (axis,):
                raise ScheduleError(f"{where}: axis {axis} is joined; name {mesh.parts(axis)}")
    _names_differ(f"{where}: axis", axes)


def _inspect_roles(schedule: UncheckedSchedule) -> None:
    mesh = schedule.mesh
    names = [role.name for role in schedule.roles]
    if sorted(names) != sorted(program.role for program in schedule.programs):
        raise ScheduleError(f"programs: one for each role is needed, roles are {', '.join(names)}")
    _names_differ("role", names)
    boxes = [(role.name, box) for role in schedule.roles for box in role.boxes]
    for index, (name, box) in enumerate(boxes):
        with at(f"role {name}"):
            mesh.limits(box)
            if any(span.step != 1 for span in box):
                raise ScheduleError(f"role {name}: its ranks must be neighbors, of step 1")
        for other_name, other in boxes[:index]:
            if mesh.boxes_meet(box, other):
                raise ScheduleError(f"role {name}: shares ranks with role {other_name}")
    covered = sum(role.size(mesh) for role in schedule.roles)
    if covered != mesh.size:
        raise ScheduleError(f"roles: cover {covered} ranks of {mesh.size}")


def _inspect_contract(schedule: UncheckedSchedule) -> None:
    contract = schedule.contract
    given = {scalar.name for scalar in schedule.scalars if scalar.given}
    for rule in contract.rules.values():
        if isinstance(rule.learning_rate, str) and rule.learning_rate not in given:
            raise ScheduleError(
                f"contract: learning rate {rule.learning_rate!r} is no scalar that is given"
            )
    roles = {role.name for role in schedule.roles}
    pools = {pool.name for pool in schedule.pools}
    _names_differ("contract.parameters", [parameter.name for parameter in contract.parameters])
    _names_differ(
        "contract.peak_bytes", [f"{role}/{pool}" for role, pool, _ in contract.peak_bytes]
    )
    for role, pool, _ in contract.peak_bytes:
        if role not in roles or pool not in pools:
            raise ScheduleError(f"contract.peak_bytes: no role {role!r} with pool {pool!r}")
    single = {*Contract().data_axes, *(axis.name for axis in schedule.mesh.axes)}
    for field in ("data_axes", "expert_axes"):
        if missing := set(getattr(contract, field)) - single:
            raise ScheduleError(f"contract.{field}: no single axis {min(missing)!r}")
    for volume in contract.wire_bytes or ():
        if volume.group not in schedule.group_by_name:
            raise ScheduleError(f"contract.wire_bytes: no group {volume.group!r}")


HOST_ACTIONS = (Allocate, Free, HostWait, ReadCounts, SetScalar, Branch)
"""Operations that an edge cannot name: they end when the host has passed them."""

_HOST_ACTIONS = frozenset(HOST_ACTIONS)


class _Inspector:
    """Checks one program against the names that it may use."""

    def __init__(self, schedule: UncheckedSchedule, program: Program) -> None:
        self.schedule = schedule
        self.program = program
        self.mesh: Mesh = schedule.mesh
        self.streams = set(schedule.streams)
        self.pools = {pool.name: pool for pool in schedule.pools}
        self.scalars = {scalar.name: scalar for scalar in schedule.scalars}
        self.counts = {count.name: count for count in schedule.counts}
        self.sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self.good: set[object] = set()  # ids of views and keys of recurring operations
        self.in_step = False
        self.setup = {operation.id for operation in walk(program.setup)}
        self.awaitable: set[Edge] = set()

    def inspect(self) -> None:
        """Raise on the first fault of the program."""
        self._inspect_buffers()
        self._inspect_part(self.program.setup, self.program.setup_work)
        self.in_step = True
        self._inspect_part(self.program.step, self.program.step_work)

    def _inspect_part(self, operations: Sequence[Operation], work: Sequence[Operation]) -> None:
        """Raise on the first fault of a list; most operations need only a quick test."""
        self.awaitable = {each.id for each in work if type(each) not in _HOST_ACTIONS}
        by_name = self.program.by_name
        for operation in walk(operations):
            if type(operation) is Allocate or (type(operation) is Free and not operation.uses):
                if operation.buffer not in by_name:
                    self._need_buffer(operation.id, operation.buffer)
            elif not (isinstance(operation, (Copy, Compute)) and self._comes_again(operation)):
                self._inspect_operation(operation)

    def _comes_again(self, operation: Copy | Compute) -> bool:
        """Return True if the same operation was inspected before, in another micro-batch."""
        key = recurring(operation)
        if key not in self.good:
            self.good.add(key)  # it is inspected next, and raises if it is not
            return False
        if not key or operation.after or operation.stream not in self.streams:
            return False
        return not (isinstance(operation, Compute) and (operation.scalars or operation.draw))

    def _inspect_buffers(self) -> None:
        role = self.program.role
        for buffer in self.program.buffers:
            where = f"{role}/buffer {buffer.name}"
            pool = self.pools.get(buffer.pool)
            if pool is None:
                names = sorted(self.pools)
                raise ScheduleError(f"{where}: no pool {buffer.pool!r}; pools are {names}")
            inspect_place(where, buffer, pool)
            if buffer.home not in self.streams:
                raise ScheduleError(f"{where}: no stream {buffer.home!r}")
            if buffer.rows is not None:
                inspect_rows(where, buffer, buffer.rows, self.counts)
            if buffer.layout is None and buffer.shard is not None:
                raise ScheduleError(f"{where}: shard without a layout")
            if buffer.layout is not None:
                self._inspect_layout_of(where, buffer, buffer.layout)
        where = f"{self.program.role}/persistent"
        _names_differ(where, self.program.persistent)
        for name in self.program.persistent:
            self._need_buffer(where, name)
            if self.program.by_name[name].rows is not None:
                raise ScheduleError(f"{where}: rows of {name} are counted, for each micro-batch")

    def _inspect_layout_of(self, where: str, buffer: Buffer, name: str) -> None:
        layout = self.schedule.layout_by_name.get(name)
        if layout is None:
            raise ScheduleError(f"{where}: no layout {name!r}")
        needed = layout.elements
        if buffer.shard is not None:
            if buffer.shard != layout.axis:
                raise ScheduleError(
                    f"{where}: shard {buffer.shard!r}, but the layout is cut along {layout.axis!r}"
                )
            count = self.mesh.axis_size(buffer.shard)
            sizes = [layout.segment(each, count)[1] for each in ranks_of_all_sizes(layout, count)]
            needed = max(sizes)
        if buffer.elements < needed or (buffer.elements > needed and not buffer.has_room):
            raise ScheduleError(f"{where}: {buffer.elements} elements, its layout has {needed}")

    def _inspect_operation(self, operation: Operation) -> None:
        where = operation.id
        match operation:  # the most frequent first: cases are tried in order
            case Free(buffer=buffer, uses=uses):
                self._need_buffer(where, buffer)
                self._inspect_edges(where, uses)
                return
            case Compute():
                self._inspect_compute(operation)
            case Communication():
                self._inspect_communication(operation)
            case Allocate(buffer=buffer):
                self._need_buffer(where, buffer)
                return
            case HostWait():
                self._inspect_wait(operation)
                return
            case SetScalar():
                self._inspect_set_scalar(operation)
                return
            case Branch(number=number, after=after):
                inspect_decision(operation)
                self._inspect_edges(where, after)
                if isinstance(number, View):
                    self._inspect_view(where, number)
                else:
                    self._need_scalar(where, number)
                return
            case Fill(target=target, scalar=scalar):
                self._inspect_view(where, target)
                if scalar is not None:
                    self._need_scalar(where, scalar)
            case Read() | Write():
                self._inspect_copy(operation)
                inspect_file_transfer(operation, self.program.by_name, self.pools)
            case Copy():
                self._inspect_copy(operation)
            case Together(members=members):
                for member in members:
                    self._inspect_communication(member)
            case _:
                assert_never(operation)
        if operation.stream not in self.streams:
            raise ScheduleError(f"{where}: no stream {operation.stream!r}")
        self._inspect_edges(where, operation.after)

    def _inspect_wait(self, wait: HostWait) -> None:
        self._inspect_edges(wait.id, (wait.operation,))
        if isinstance(wait, ReadCounts):
            self._inspect_view(wait.id, wait.source)
            count = need_count(wait.id, wait.count, self.counts)
            inspect_read(wait, count, self.sizes[count.group])

    def _inspect_copy(self, copy: Copy) -> None:
        where, source, target = copy.id, copy.source, copy.target
        self._inspect_view(where, source)
        self._inspect_view(where, target)
        if copy.by_parameter:
            self._need_parameters(where, source)
            self._need_parameters(where, target)
        elif source.size != target.size:
            raise ScheduleError(f"{where}: copies {source.size} elements to {target.size}")
        elif len({window_of(view) for view in (source, target)}) > 1:
            raise ScheduleError(f"{where}: copies a window to another one")

    def _inspect_set_scalar(self, change: SetScalar) -> None:
        self._need_scalar(change.id, change.scalar)
        if change.counter is not None:
            self._need_scalar(change.id, change.counter)
        inspect_change(change)

    def _inspect_edges(self, where: str, edges: tuple[Edge, ...]) -> None:
        by_id = self.program.by_id
        for edge in edges:
            if edge in self.awaitable:  # an operation of this part, on a stream
                continue
            previous = isinstance(edge, Previous)
            name = edge.operation if isinstance(edge, Previous) else edge
            if name not in by_id:
                raise ScheduleError(f"{where}: after {name!r}, which is no operation")
            if type(by_id[name]) in _HOST_ACTIONS:
                raise ScheduleError(f"{where}: after {name!r}, which is on no stream")
            if previous and not self.in_step:
                raise ScheduleError(f"{where}: setup has no previous {name!r}")
            if not previous and (name in self.setup) is self.in_step:
                part = "setup" if self.in_step else "the step"
                raise ScheduleError(f"{where}: after {name!r}, which is in {part}")

    def _inspect_compute(self, compute: Compute) -> None:
        where, table = compute.id, COMPUTE_ACCESS[compute.action]
        for operand in compute.operands:
            if operand.role not in table:
                allowed = ", ".join(table)
                raise ScheduleError(
                    f"{where}: {compute.action} has no operand {operand.role}; it has {allowed}"
                )
            if operand.partial:
                with at(where):
                    for axis in operand.partial:
                        self.mesh.axis_size(axis)
            if id(operand.view) not in self.good:
                self._inspect_view(where, operand.view)
        for scalar in compute.scalars:
            self._need_scalar(where, scalar)
        if compute.draw is not None:
            self._inspect_draw(where, compute.action, compute.draw)
        match compute.action:
            case Action.UPDATE:
                inspect_update(compute, self.scalars)
            case Action.CLIP:
                need_numbers(compute, Role.INPUT, 1)
                if not isinstance(compute.rule, ClipNorm):
                    raise ScheduleError(f"{where}: rule {compute.rule} must be ClipNorm")
            case Action.NORM | Action.FINITE:
                need_numbers(compute, Role.OUTPUT, 1)
            case Action.AMAX:
                measured = sum(each.role is not Role.OUTPUT for each in compute.operands)
                need_numbers(compute, Role.OUTPUT, measured)
            case _:
                pass  # the model determines which values flow and are saved

    def _inspect_draw(self, where: str, action: Action, draw: Draw) -> None:
        if action not in (Action.FORWARD, Action.RECOMPUTE):
            raise ScheduleError(f"{where}: {action} draws no random numbers, forward does")
        if draw.generator not in {generator.name for generator in self.schedule.generators}:
            raise ScheduleError(f"{where}: no generator {draw.generator!r}")
        if draw.restores is not None:
            drawn = self.program.by_id.get(draw.restores)
            if not isinstance(drawn, Compute) or drawn.draw is None:
                raise ScheduleError(f"{where}: restores {draw.restores!r}, which draws nothing")

    def _inspect_communication(self, operation: Communication) -> None:
        where = operation.id
        if operation.group not in self.sizes:
            raise ScheduleError(f"{where}: no group {operation.group!r}")
        count = self.sizes[operation.group]
        exchange = operation if isinstance(operation, AllToAll) else None
        if exchange is not None and is_counted(exchange, self.program.by_name):
            inspect_exchange(exchange, self.program.by_name, self.counts)
        elif exchange is not None and (exchange.sent or exchange.received):
            inspect_blocks(where, exchange, count)
        elif isinstance(operation, CollectiveOperation):
            source, target = operation.source, operation.target
            if operation.splits is operation.joins:
                self._need_sizes(where, target, source.size)
                if operation.splits and source.size % count:
                    raise ScheduleError(f"{where}: {source.size} elements are not {count} blocks")
            elif operation.joins:
                self._need_sizes(where, target, count * source.size)
            else:
                self._need_sizes(where, source, count * target.size)
        if isinstance(operation, Broadcast) and not 0 <= operation.root < count:
            raise ScheduleError(f"{where}: root {operation.root} is outside 0 to {count - 1}")
        for view in (operation.reads, operation.writes):
            if view is None:
                continue
            self._inspect_view(where, view)
            buffer = self.program.by_name[view.buffer]
            if exchange is None:
                need_gathered(operation, self.program.by_name, buffer, count)
            if view.layout is not None:
                raise ScheduleError(f"{where}: a collective needs equal sizes on all ranks")
            if buffer.dtype is not operation.wire:
                raise ScheduleError(
                    f"{where}: wire dtype {operation.wire}, but {view.buffer} is {buffer.dtype}"
                )

    def _need_parameters(self, where: str, view: View) -> None:
        buffer = self.program.by_name[view.buffer]
        layout = self.schedule.layout_by_name.get(buffer.layout or "")
        size = layout.elements if layout is not None and buffer.has_room else buffer.elements
        if layout is None or view != View(buffer=buffer.name, size=size):
            needed = "the whole of a buffer with a layout"
            raise ScheduleError(f"{where}: by parameter needs {needed}, not of {view.buffer}")

    def _need_sizes(self, where: str, view: View, needed: int) -> None:
        if view.size != needed:
            raise ScheduleError(f"{where}: {view.buffer} has {view.size} elements, not {needed}")

    def _inspect_view(self, where: str, view: View) -> None:
        if id(view) not in self.good:
            self._need_buffer(where, view.buffer)
            buffer = self.program.by_name[view.buffer]
            inspect_view(self.schedule, buffer, where, view)
            need_whole(where, buffer, view)
            self.good.add(id(view))

    def _need_buffer(self, where: str, name: str) -> None:
        if name not in self.program.by_name:
            raise ScheduleError(f"{where}: no buffer {name!r}")

    def _need_scalar(self, where: str, name: str) -> None:
        if name not in self.scalars:
            raise ScheduleError(f"{where}: no scalar {name!r}")
