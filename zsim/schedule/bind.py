"""Replace named counts by the numbers of a binding: a schedule that backends can run.

Ranks with equal counts share a program. Members of a class of the binding have the sizes
of the largest of them, at most one row more in each block than in the binding. A buffer whose
rows differ between micro-batches becomes one buffer for each of them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from msgspec.structs import replace as changed

from zsim.model.kernel import Kernel
from zsim.model.kernel import bound as bound_kernel
from zsim.model.tensor_lifetime import AllocationEvent, AllocationTrace
from zsim.model.token_loads import TokenLoads, loads_of, repeated
from zsim.schedule.binding import (
    Balanced,
    Binding,
    BindingError,
    CountPlace,
    Counts,
    Zipf,
    by_member,
    routed,
)
from zsim.schedule.changed_views import Operands, with_views
from zsim.schedule.counts import NamedCount, RowIndex, Rows
from zsim.schedule.mesh import Box, Coordinates, Group, Mesh, Span
from zsim.schedule.operation import (
    Allocate,
    AllToAll,
    Branch,
    Compute,
    Free,
    Operand,
    Operation,
    Together,
    View,
    walk,
)
from zsim.schedule.program import Buffer, Contract, Program, RankRole
from zsim.schedule.schedule import Schedule

Blocks = tuple[tuple[int, ...], ...]
"""Rows from each member of a group to each member."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcessRows:
    """The first allocation for which a binding has more rows than the maximum of a count.

    `maximum_bytes` is the size of `buffer` with the maximum number of rows.
    """

    rank: int
    operation: str
    buffer: Buffer
    maximum_bytes: int
    rows: int
    count: NamedCount


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSchedule:
    """A schedule with numbers, and the first excess over a maximum, if there is any."""

    schedule: Schedule
    excess: ExcessRows | None = None


def bound(schedule: Schedule, binding: Binding) -> BoundSchedule:
    """Return `schedule` with the numbers of `binding` in place of named counts.

    Raises:
        BindingError: the binding does not fit the counts.
    """
    if not schedule.counts:
        return BoundSchedule(schedule=schedule)
    _need_equal_parts(schedule, binding)
    sizes = _Sizes(schedule, binding)
    roles: list[RankRole] = []
    programs: list[Program] = []
    excess: list[ExcessRows] = []
    for role in schedule.roles:
        parts = _parts(schedule, role, sizes)
        (program,) = (each for each in schedule.programs if each.role == role.name)
        for number, (own, ranks) in enumerate(parts.items()):
            name = role.name if len(parts) == 1 else f"{role.name}/{number}"
            boxes = role.boxes if len(parts) == 1 else _boxes(schedule.mesh, ranks)
            made = _Program(sizes, program, dict(own), ranks[0])
            roles.append(RankRole(name=name, boxes=boxes))
            programs.append(made.program(name))
            excess += made.excess[:1]
    return BoundSchedule(
        schedule=replace(
            schedule,
            roles=tuple(roles),
            programs=tuple(programs),
            contract=_kept_promises(schedule.contract),
        ),
        excess=min(excess, key=lambda each: each.rank, default=None),
    )


def _need_equal_parts(schedule: Schedule, binding: Binding) -> None:
    """Raise BindingError if ranks with parts of the same experts would have unequal rows.

    Raises:
        BindingError: they would: counts differ between groups of experts.
    """
    if binding.alike(0) is not None:
        return
    buffers = (each for program in schedule.programs for each in program.buffers)
    if any(each.rows is not None and each.rows.parts > 1 for each in buffers):
        field = "seed" if isinstance(binding, Zipf) else "rows"
        raise BindingError(
            f"binding.{field}: counts that differ between groups are not modelled with "
            "expert_tensor above 1; use busiest alone"
        )


def _kept_promises(contract: Contract) -> Contract:
    """Return the promises that do not depend on the numbers of counts."""
    return replace(contract, peak_bytes=(), wire_bytes=None, host_bytes=None)


Where = tuple[str, int, int, int]
"""A count, a layer, a micro-batch, and the number of a group of experts."""

Seat = tuple[int, int]
"""The number of a group, and a member of it."""

Seats = tuple[tuple[str, Seat], ...]
"""The place of a rank for each count."""


class _Sizes:
    """Rows between members by place."""

    def __init__(self, schedule: Schedule, binding: Binding) -> None:
        self.schedule = schedule
        self.counts = {count.name: count for count in schedule.counts}
        self._binding = binding
        self._numbers: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in self.counts}
        self.blocks, self.loads = cache(self._blocks), cache(self._loads)
        self.equal, self.numbers = cache(self._equal), cache(self._rows_at)

    def group(self, count: NamedCount) -> Group:
        """Return the group of a count."""
        return self.schedule.group_by_name[count.group]

    def members(self, count: NamedCount) -> int:
        """Return the number of members that exchange the rows of a count."""
        return self.group(count).size(self.schedule.mesh)

    def seat(self, count: NamedCount, at: Coordinates) -> Seat | None:
        """Return a rank's seat, which members with equal counts share; None outside the group."""
        mesh, group = self.schedule.mesh, self.group(count)
        if not group.holds(mesh, at):
            return None
        other = tuple(at[axis.name] for axis in mesh.axes if axis.name not in group.axes)
        numbers = self._numbers[count.name]
        number = numbers.setdefault(other, len(numbers))
        member = group.index(mesh, at)
        binding = self._binding_of(count)
        alike = binding.alike(member)
        if alike is None:
            return number, member
        members = range(self.members(count))
        return 0, next(each for each in members if binding.alike(each) == alike)

    def _binding_of(self, count: NamedCount) -> Binding:
        """Return the binding of a count: numbers of padded rows are equal under any."""
        return Balanced() if count.padded else self._binding

    def where(self, name: str, layer: int, micro_batch: int, group: int) -> Where:
        """Return the first place with the same numbers, if they are equal in all places."""
        uniform = self._binding_of(self.counts[name]).alike(0) is not None
        return (name, 0, 0, 0) if uniform else (name, layer, micro_batch, group)

    def _rows_at(self, name: str, layer: int, micro_batch: int, group: int) -> Counts:
        """Return the rows from each source to each expert."""
        count = self.counts[name]
        place = CountPlace(micro_batch, layer, group, self.members(count))
        return routed(self._binding_of(count), count, place)

    def _equal(self, name: str, layer: int, micro_batch: int, group: int) -> bool:
        """Return True if all members send equal numbers of rows to all members."""
        blocks = self.blocks(name, layer, micro_batch, group)
        return len({rows for row in blocks for rows in row}) == 1

    def _loads(self, where: Where, member: int, own: RowIndex) -> TokenLoads:
        """Return the rows of each expert that a member sends, or receives for its own experts."""
        name = where[0]
        count = self.counts[name]
        members = self.members(count)
        found = self.numbers(*where)
        if own is RowIndex.SOURCE:
            return replace(loads_of(found[member].tolist()), name=name)
        held = count.experts // members
        mine = found[:, member * held : (member + 1) * held].sum(axis=0)
        return replace(loads_of(mine.tolist()), name=name)

    def _blocks(self, name: str, layer: int, micro_batch: int, group: int) -> Blocks:
        """Return rows by source and target; members with equal counts have their maximum."""
        count = self.counts[name]
        members = self.members(count)
        binding = self._binding_of(count)
        found = by_member(self.numbers(name, layer, micro_batch, group), members).tolist()
        alike = [binding.alike(member) for member in range(members)]
        most: dict[tuple[int, int], int] = {}
        for source, row in enumerate(found):
            for target, rows in enumerate(row):
                one, other = alike[source], alike[target]
                if one is not None and other is not None:
                    most[one, other] = max(rows, most.get((one, other), 0))
        return tuple(
            tuple(
                rows
                if (one := alike[source]) is None or (other := alike[target]) is None
                else most[one, other]
                for target, rows in enumerate(row)
            )
            for source, row in enumerate(found)
        )


def _parts(schedule: Schedule, role: RankRole, sizes: _Sizes) -> dict[Seats, list[int]]:
    """Return the ranks of a role by their places."""
    found: dict[Seats, list[int]] = {}
    for rank in range(schedule.mesh.size):
        at = schedule.mesh.coordinates(rank)
        seats = ((name, sizes.seat(count, at)) for name, count in sizes.counts.items())
        own = tuple((name, seat) for name, seat in seats if seat is not None)
        if role.holds(schedule.mesh, at):
            found.setdefault(own, []).append(rank)
    return found


def _boxes(mesh: Mesh, ranks: Iterable[int]) -> tuple[Box, ...]:
    """Return boxes that hold `ranks` and no others."""
    places = [tuple(mesh.coordinates(rank)[axis.name] for axis in mesh.axes) for rank in ranks]
    return tuple(_split(mesh, places, 0))


def _split(mesh: Mesh, places: list[tuple[int, ...]], depth: int) -> Iterator[Box]:
    """Yield boxes of places along the axes from number `depth` on."""
    if depth == len(mesh.axes):
        yield ()
        return
    by_first: dict[int, list[tuple[int, ...]]] = {}
    for place in places:
        by_first.setdefault(place[0], []).append(place[1:])
    runs: list[tuple[int, int, list[tuple[int, ...]]]] = []
    for first, rest in sorted(by_first.items()):
        if runs and runs[-1][1] == first and runs[-1][2] == rest:
            runs[-1] = (runs[-1][0], first + 1, rest)
        else:
            runs.append((first, first + 1, rest))
    for start, end, rest in runs:
        axis = mesh.axes[depth]
        whole = (start, end) == (0, axis.size)
        own = () if whole else (Span(axis=axis.name, start=start, end=end),)
        for box in _split(mesh, rest, depth + 1):
            yield (*own, *box)


Sizes = Mapping[int, tuple[int, int]]
"""Rows of buffers with counted rows, by number, and their rows with balanced counts."""


def _stays(turn: AllocationEvent, sizes: Sizes) -> bool:
    """Return False for a tensor without rows."""
    return turn[0] not in sizes or sizes[turn[0]][0] > 0


def _resized(turn: AllocationEvent, sizes: Sizes) -> AllocationEvent:
    """Return the turn of a tensor whose bytes are in proportion to its rows, at least one."""
    number, tensor, size = turn
    if number not in sizes or not size:
        return turn
    rows, mean = sizes[number]
    most = max(1, abs(size) * rows // mean)
    return number, tensor, most if size > 0 else -most


@dataclass(slots=True)
class _Program:
    """A program with the numbers of one place for each count."""

    sizes: _Sizes
    source: Program
    seats: dict[str, Seat]
    rank: int
    excess: list[ExcessRows] = field(default_factory=list[ExcessRows])
    made: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    now: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    batch: dict[str, int] = field(default_factory=dict[str, int])
    varying: set[str] = field(default_factory=set[str])
    resized: set[str] = field(default_factory=set[str])
    views: dict[tuple[str, str], View] = field(default_factory=dict[tuple[str, str], View])
    operands: Operands = field(default_factory=dict[tuple[object, ...], tuple[Operand, ...]])
    kernels: dict[tuple[object, ...], tuple[Kernel, ...]] = field(
        default_factory=dict[tuple[object, ...], tuple[Kernel, ...]]
    )

    def program(self, role: str) -> Program:
        """Return the program under the name of its role."""
        self._find_varying()
        setup = tuple(map(self._operation, self.source.setup))
        step = tuple(map(self._operation, self.source.step))
        buffers: list[Buffer] = []
        for buffer in self.source.buffers:
            if buffer.rows is None and buffer.name not in self.resized:
                buffers.append(buffer)
        return replace(
            self.source,
            role=role,
            buffers=(*buffers, *self.made.values()),
            setup=setup,
            step=step,
        )

    def _find_varying(self) -> None:
        """Find the buffers whose rows differ between micro-batches."""
        sizes: dict[str, int] = {}
        for operation in walk((*self.source.setup, *self.source.step)):
            if type(operation) is not Allocate:
                continue
            rows = self.source.by_name[operation.buffer].rows
            if rows is not None:
                size = self._rows(rows, operation.micro_batch or 0)
                if sizes.setdefault(operation.buffer, size) != size:
                    self.varying.add(operation.buffer)

    def _blocks(self, rows: Rows, micro_batch: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the rows that the rank sends to each member and receives, and those it keeps."""
        group, member = self.seats[rows.count]
        where = self.sizes.where(rows.count, rows.layer, micro_batch, group)
        blocks = self.sizes.blocks(*where)
        return blocks[member], tuple(row[member] for row in blocks), blocks[member][member]

    def _rows(self, rows: Rows, micro_batch: int) -> int:
        sent, received, _ = self._blocks(rows, micro_batch)
        return sum(sent if rows.own is RowIndex.SOURCE else received)

    def _operation(self, operation: Operation) -> Operation:
        match operation:
            case Allocate():
                return self._allocate(operation)
            case Free(buffer=name):
                own = self.now.pop(name, None)
                return operation if own is None else changed(operation, buffer=own.name)
            case AllToAll():
                return self._exchange(operation)
            case Compute():
                made = with_views(operation, self._view, self.operands)
                assert isinstance(made, Compute)
                return self._work(operation, made)
            case Together(members=members):
                return changed(operation, members=tuple(map(self._operation, members)))
            case Branch(then=then, otherwise=otherwise):
                sides = (tuple(map(self._operation, side)) for side in (then, otherwise))
                return changed(operation, **dict(zip(("then", "otherwise"), sides, strict=True)))
            case _:
                return with_views(operation, self._view, self.operands)

    def _work(self, compute: Compute, made: Compute) -> Compute:
        """Return `made` with the work of the rows that `compute` uses."""
        found: dict[RowIndex, tuple[Rows, int]] = {}
        for operand in compute.operands:
            rows = self.source.by_name[operand.view.buffer].rows
            if rows is not None and operand.view.buffer in self.batch:
                found.setdefault(rows.own, (rows, self.batch[operand.view.buffer]))
        if not found or not any(kernel.loads for kernel in compute.kernels):
            return made
        own = RowIndex.EXPERT if RowIndex.EXPERT in found else RowIndex.SOURCE
        rows, micro_batch = found[own]
        group, member = self.seats[rows.count]
        key = self.sizes.where(rows.count, rows.layer, micro_batch, group), member, own
        parts = max(self._parts(each.view.buffer) for each in compute.operands)
        work = (id(compute.kernels), *key, parts)
        if work not in self.kernels:
            loads = repeated(self.sizes.loads(*key), parts)
            kernels = tuple(bound_kernel(kernel, loads) for kernel in compute.kernels)
            self.kernels[work] = compute.kernels if kernels == compute.kernels else kernels
        kernels = self.kernels[work]
        return made if kernels is made.kernels else changed(made, kernels=kernels)

    def _parts(self, buffer: str) -> int:
        """Return the number of ranks whose rows a buffer has."""
        rows = self.source.by_name[buffer].rows
        return 1 if rows is None else rows.parts

    def _course(self, buffer: Buffer, own: str, micro_batch: int) -> AllocationTrace | None:
        """Return the allocations of `buffer`, now called `own`, for the present rows.

        Forward allocates a workspace that recomputation also uses, with saved tensors that do not
        exist before it: they have the rows of this `micro_batch`.
        """
        course = buffer.course
        if course is None:
            return None
        sizes: dict[int, tuple[int, int]] = {}
        for number in range(len(course.buffers) + 1):
            name = course.name(number, buffer.name)
            rows = self.source.by_name[name].rows if name else None
            if rows is not None:
                batch = self.batch.get(name, micro_batch)
                sizes[number] = self._rows(rows, batch), self.sizes.counts[rows.count].sent
        if all(rows == mean for rows, mean in sizes.values()):
            turns = course.turns
        else:
            turns = tuple(_resized(turn, sizes) for turn in course.turns if _stays(turn, sizes))
        now = {name: made.name for name, made in self.now.items()} | {buffer.name: own}
        names = tuple(now.get(name, name) for name in course.buffers)
        return replace(course, buffers=names, turns=turns)

    def _allocate(self, allocate: Allocate) -> Allocate:
        buffer = self.source.by_name[allocate.buffer]
        if buffer.rows is None:
            return self._with_course(allocate, buffer)
        micro_batch = allocate.micro_batch or 0
        rows = self._rows(buffer.rows, micro_batch)
        name = buffer.name + f"/mb{micro_batch}" * (buffer.name in self.varying)
        self.batch[buffer.name] = micro_batch
        own = changed(
            buffer,
            name=name,
            elements=rows * buffer.rows.width * buffer.rows.parts,
            rows=None,
            course=self._course(buffer, name, micro_batch),
        )
        self.made[name] = self.now[buffer.name] = own
        count = self.sizes.counts[buffer.rows.count]
        if buffer.rows.own is RowIndex.EXPERT and rows > count.maximum:
            self.excess.append(
                ExcessRows(
                    rank=self.rank,
                    operation=allocate.id,
                    buffer=own,
                    maximum_bytes=buffer.size_bytes,
                    rows=rows,
                    count=count,
                )
            )
        return changed(allocate, buffer=name, micro_batch=None)

    def _with_course(self, allocate: Allocate, buffer: Buffer) -> Allocate:
        """Return the allocation of a buffer that may have allocations of counted rows."""
        course = buffer.course
        if course is None or not any(name in self.batch for name in course.buffers):
            return allocate
        name = buffer.name
        micro_batch = max(self.batch.get(each, 0) for each in course.buffers)
        if any(each in self.varying for each in course.buffers):
            name += f"/mb{micro_batch}"
        self.resized.add(buffer.name)
        own = changed(buffer, name=name, course=self._course(buffer, name, micro_batch))
        self.made[name] = self.now[buffer.name] = own
        return changed(allocate, buffer=name)

    def _view(self, view: View) -> View:
        own = self.now.get(view.buffer)
        if own is None:
            return view
        key = (view.buffer, own.name)
        if key not in self.views:
            self.views[key] = View(buffer=own.name, size=own.elements)
        return self.views[key]

    def _exchange(self, exchange: AllToAll) -> AllToAll:
        rows = self.source.by_name[exchange.source.buffer].rows
        if rows is None:
            return exchange
        sent, received, kept = self._blocks(rows, self.batch[exchange.source.buffer])
        if rows.own is RowIndex.EXPERT:  # rows go back to their sources
            sent, received = received, sent
        width, micro_batch = rows.width, self.batch[exchange.source.buffer]
        group, _ = self.seats[rows.count]
        if self.sizes.equal(*self.sizes.where(rows.count, rows.layer, micro_batch, group)):
            return changed(
                exchange, source=self._view(exchange.source), target=self._view(exchange.target)
            )
        return changed(
            exchange,
            source=self._view(exchange.source),
            target=self._view(exchange.target),
            sent=tuple(width * each for each in sent),
            received=tuple(width * each for each in received),
            kept=width * kept,
        )
