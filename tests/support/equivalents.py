"""Right schedules made of right ones: the same training, done in another way.

Each transformation takes a schedule and gives others, with the change in one place or in all; what
they promise of memory and volume is left out. Whether they are right is judged by `edits.court`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from edits.aim import of_role, with_operands
from edits.aims_of_regions import in_windows, sharded
from edits.aims_of_scaling import numbers_reduced
from edits.programs import Edit, apart, changed, everywhere, rewritten, with_buffer

from zsim.schedule.operation import (
    Action,
    AllGather,
    Allocate,
    AllReduce,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    ReduceScatter,
    Reduction,
    Role,
    Together,
    View,
    walk,
)
from zsim.schedule.schedule import Buffer, Contract, Kind, Program, Schedule

Equivalent = Callable[[Schedule], Iterator[Edit]]
"""Right schedules that do the same as a right one."""
Parts = tuple[list[Buffer], list[Operation]]
"""Buffers to declare, and what stands in place of an operation."""


def unpromised(schedule: Schedule) -> Schedule:
    """The schedule without promises of memory and volume."""
    contract: Contract = replace(schedule.contract, peak_bytes=(), wire_bytes=None, host_bytes=None)
    return replace(schedule, contract=contract)


def spread(
    schedule: Schedule, make: Callable[[Schedule, Program, Operation], Parts | None], text: str
) -> Iterator[Edit]:
    """The schedule with the last operation that `make` takes replaced, and with all of them."""
    sites = {
        operation.id
        for program in schedule.programs
        for operation in walk(program.step)
        if make(schedule, program, operation) is not None
    }
    ordered = [
        operation.id
        for program in schedule.programs
        for operation in walk(program.step)
        if operation.id in sites
    ]
    for chosen in (set(ordered[-1:]), sites) if len(sites) > 1 else (sites,):
        if chosen:
            found = everywhere(schedule, lambda program: _made(schedule, program, chosen, make))  # noqa: B023 (used at once)
            yield Edit(f"{text}, {len(chosen)} of {len(sites)}", unpromised(found))


def _made(
    schedule: Schedule,
    program: Program,
    chosen: set[str],
    make: Callable[[Schedule, Program, Operation], Parts | None],
) -> Program:
    buffers: list[Buffer] = []

    def change(each: Operation) -> Iterable[Operation]:
        parts = make(schedule, program, each) if each.id in chosen else None
        if parts is None:
            return (each,)
        buffers.extend(parts[0])
        return parts[1]

    found = rewritten(program, change, part="step")
    declared = replace(found, step=(), setup=())
    for buffer in buffers:
        declared = with_buffer(declared, buffer)
    return replace(declared, step=found.step, setup=found.setup)


def scratch(program: Program, like: str, name: str, elements: int, home: str) -> Buffer:
    """A buffer in the pool and format of another one."""
    buffer = program.by_name[like]
    return Buffer(
        name=name,
        pool=buffer.pool,
        elements=elements,
        dtype=buffer.dtype,
        kind=Kind.WORKSPACE,
        home=home,
    )


def held(buffer: Buffer, *operations: Operation) -> Parts:
    """Operations on its home stream while a buffer is alive."""
    taken = Allocate(id=f"{buffer.name}/take", buffer=buffer.name)
    return [buffer], [taken, *operations, Free(id=f"{buffer.name}/give", buffer=buffer.name)]


def whole(buffer: Buffer) -> View:
    """All of a buffer."""
    return View(buffer=buffer.name, size=buffer.elements)


def is_plain(view: View) -> bool:
    """Whether a view is the same on every rank."""
    return view.axis is None and view.layout is None


def halves(view: View) -> tuple[View, View]:
    """Both halves of a plain view."""
    half = view.size // 2
    return (
        replace(view, size=half),
        replace(view, start=view.start + half, size=view.size - half),
    )


def scattered_and_gathered(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """An all-reduce is a reduce-scatter and an all-gather."""
    if not isinstance(each, AllReduce) or each.reduction is Reduction.MAX:
        return None
    count = schedule.group_by_name[each.group].size(schedule.mesh)
    if each.source.size % count or each.source.size < 2 or count < 2:
        return None
    shard = scratch(
        program, each.source.buffer, f"{each.id}/shard", each.source.size // count, each.stream
    )
    first = ReduceScatter(
        id=f"{each.id}/scatter",
        stream=each.stream,
        after=each.after,
        group=each.group,
        source=each.source,
        target=whole(shard),
        reduction=each.reduction,
        wire=each.wire,
        accumulate=each.accumulate,
    )
    second = AllGather(
        id=each.id,
        stream=each.stream,
        group=each.group,
        source=whole(shard),
        target=each.target,
        wire=each.wire,
    )
    return held(shard, first, second)


def in_chunks(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """An all-reduce is done in two chunks."""
    del schedule, program
    if not isinstance(each, AllReduce) or each.source.size < 2:
        return None
    if not (is_plain(each.source) and is_plain(each.target)):
        return None
    sources, targets = halves(each.source), halves(each.target)
    first = replace(each, id=f"{each.id}/first", source=sources[0], target=targets[0])
    return [], [first, replace(each, source=sources[1], target=targets[1])]


def on_a_copy(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """A reduction is done on a copy, which goes back."""
    del schedule
    if not isinstance(each, AllReduce) or each.source.size < 2:
        return None
    copy = scratch(program, each.source.buffer, f"{each.id}/copy", each.source.size, each.stream)
    there = Copy(
        id=f"{each.id}/there",
        stream=each.stream,
        after=each.after,
        source=each.source,
        target=whole(copy),
    )
    summed = replace(each, id=f"{each.id}/sum", after=(), source=whole(copy), target=whole(copy))
    back = Copy(id=each.id, stream=each.stream, source=whole(copy), target=each.target)
    return held(copy, there, summed, back)


def by_broadcasts(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """An all-gather is a broadcast of every rank."""
    del program
    if not isinstance(each, AllGather) or not is_plain(each.target):
        return None
    if each.source.buffer == each.target.buffer or not each.source.size:
        return None
    count = schedule.group_by_name[each.group].size(schedule.mesh)
    size = each.source.size
    found: list[Operation] = [
        Broadcast(
            id=each.id if root == count - 1 else f"{each.id}/{root}",
            stream=each.stream,
            after=each.after,
            group=each.group,
            source=each.source,
            target=replace(each.target, start=each.target.start + root * size, size=size),
            root=root,
            wire=each.wire,
        )
        for root in range(count)
    ]
    return [], found


def updated_in_halves(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """An update is two, of one half each."""
    del schedule, program
    if not isinstance(each, Compute) or each.action is not Action.UPDATE:
        return None
    views = [operand.view for operand in each.operands]
    if not all(is_plain(view) for view in views) or views[0].size < 2:
        return None
    made = [
        with_operands(each, (replace(one, view=halves(one.view)[number]) for one in each.operands))
        for number in (0, 1)
    ]
    return [], [replace(made[0], id=f"{each.id}/first"), made[1]]


def updated_by_windows(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """An update of a shard is three: of what the rank has of each part of the whole tensor."""
    del program
    layout = sharded(schedule).get(each.id)
    if layout is None or not isinstance(each, Compute):
        return None
    bounds = (0, min(1, layout.elements), layout.elements * 2 // 3 + 1, layout.elements + 1)
    ends = [min(bound, layout.elements) for bound in bounds]
    return [], list(in_windows(each, layout, tuple(pairwise(ends))))


def through_scratch(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """A copy goes through a scratch buffer in the format of its source."""
    del schedule
    if not isinstance(each, Copy) or each.by_parameter or not each.source.size:
        return None
    if not (is_plain(each.source) and is_plain(each.target)):
        return None
    middle = scratch(program, each.source.buffer, f"{each.id}/way", each.source.size, each.stream)
    first = Copy(
        id=f"{each.id}/out",
        stream=each.stream,
        after=each.after,
        source=each.source,
        target=whole(middle),
    )
    return held(middle, first, replace(each, after=(), source=whole(middle)))


def summed_apart(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """What is added to a sum is divided and rounded on its own first."""
    del schedule
    if not isinstance(each, Copy) or not each.accumulate or each.by_parameter:
        return None
    if not is_plain(each.source) or not each.source.size:
        return None
    own = scratch(program, each.target.buffer, f"{each.id}/own", each.source.size, each.stream)
    first = Copy(
        id=f"{each.id}/apart",
        stream=each.stream,
        after=each.after,
        source=each.source,
        target=whole(own),
        divisor=each.divisor,
    )
    return held(own, first, replace(each, after=(), source=whole(own), divisor=1))


def added_to_zero(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """A copy is added to what was zeroed before."""
    del schedule, program
    if not isinstance(each, Copy) or each.accumulate or each.by_parameter:
        return None
    if each.source.buffer == each.target.buffer:
        return None
    zero = Fill(
        id=f"{each.id}/zero",
        stream=each.stream,
        after=each.after,
        target=each.target,
        value=0.0,
    )
    return [], [zero, replace(each, accumulate=True)]


def bucket_by_bucket(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """A sum of squares is taken of one gradient after the other, and added up."""
    del schedule
    if not isinstance(each, Compute) or each.action is not Action.NORM:
        return None
    gradients = of_role(each, Role.GRADIENT)
    (output,) = of_role(each, Role.OUTPUT)
    if len(gradients) < 2:
        return None
    own = scratch(program, output.view.buffer, f"{each.id}/own", 1, each.stream)
    part = replace(output, view=whole(own))
    found: list[Operation] = [
        replace(with_operands(each, (gradients[0], output)), id=f"{each.id}/0")
    ]
    for number, gradient in enumerate(gradients[1:], 1):
        name = each.id if number == len(gradients) - 1 else f"{each.id}/add{number}"
        found.append(replace(with_operands(each, (gradient, part)), id=f"{each.id}/{number}"))
        found.append(
            Copy(
                id=name,
                stream=each.stream,
                source=whole(own),
                target=output.view,
                accumulate=True,
            )
        )
    return held(own, *found)


def in_other_order(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """What measures gradients takes them in another order, and one of them in halves."""
    del schedule, program
    if not isinstance(each, Compute) or each.action not in (Action.NORM, Action.FINITE):
        return None
    first, *rest = of_role(each, Role.GRADIENT)
    parts = [first]
    if is_plain(first.view) and first.view.size > 1:
        parts = [replace(first, view=half) for half in halves(first.view)]
    return [], [with_operands(each, (*reversed(rest), *parts, *of_role(each, Role.OUTPUT)))]


def as_a_group(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """A collective is issued as a group of one."""
    del schedule, program
    if not isinstance(each, AllReduce | ReduceScatter | AllGather):
        return None
    member = replace(each, id=f"{each.id}/member", after=())
    return [], [Together(id=each.id, stream=each.stream, after=each.after, members=(member,))]


def gathered_twice(schedule: Schedule, program: Program, each: Operation) -> Parts | None:
    """A gather is done twice in a row."""
    del schedule, program
    if not isinstance(each, AllGather) or each.source.buffer == each.target.buffer:
        return None
    return [], [replace(each, id=f"{each.id}/once"), each]


def everywhere_spread(
    make: Callable[[Schedule, Program, Operation], Parts | None], text: str
) -> Equivalent:
    """An equivalent by what it makes of single operations."""
    return lambda schedule: spread(schedule, make, text)


def flags_added(schedule: Schedule) -> Iterator[Edit]:
    """Flags of overflow are added up, not compared."""
    names = {each.id for each in numbers_reduced(schedule, Action.FINITE)}
    if names:
        made = changed(
            schedule,
            lambda each: (
                (replace(each, reduction=Reduction.SUM),)
                if isinstance(each, AllReduce) and each.id in names
                else (each,)
            ),
        )
        yield Edit("flags added up", unpromised(made))


def identical_roles(schedule: Schedule) -> Iterator[Edit]:
    """One rank has a role of its own in which it does what all do."""
    for axis in schedule.mesh.axes:
        if axis.size > 1:
            try:
                made = apart(schedule, axis.name, 0, lambda program: program)
            except ValueError:
                continue
            yield Edit(f"two roles along {axis.name}", unpromised(made))
