"""Right schedules made of right ones: the same training, done in another way.

Each transformation replaces an operation, in one place or in all; promises of memory and volume are
left out. Whether the results are right is judged by `faults.ground_truth`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from faults.changes import Aim, Edit
from faults.fault import Mutant
from faults.of_schedules.windows import in_windows, sharded
from faults.schedules import apart, everywhere, rewritten, with_buffer
from faults.selections import in_step, numbers_reduced, of_role, with_operands
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
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Contract, Kind, Program, Schedule

Parts = tuple[list[Buffer], list[Operation]]
"""Buffers to declare, and the operations in place of one."""


@dataclass(frozen=True)
class Site:
    """A place where an operation is replaced."""

    schedule: Schedule
    program: Program
    operation: Any

    def scratch(self, like: View, name: str, elements: int) -> Buffer:
        """Return a buffer of the operation's stream in the pool and format of another one."""
        buffer = self.program.by_name[like.buffer]
        return Buffer(
            name=f"{self.operation.id}/{name}",
            pool=buffer.pool,
            elements=elements,
            dtype=buffer.dtype,
            kind=Kind.WORKSPACE,
            home=self.operation.stream,
        )

    def first(self, kind: type[Operation], name: str, **fields: object) -> Any:  # noqa: ANN401  # of that kind
        """Return an operation that waits for those that the replaced one waits for."""
        return self.then(kind, f"/{name}", after=self.operation.after, **fields)

    def then(self, kind: type[Operation], name: str = "", **fields: object) -> Any:  # noqa: ANN401  # of that kind
        """Return an operation on the same stream; without `name`, others wait for it."""
        known: dict[str, Any] = {"stream": self.operation.stream, **fields}
        return kind(id=f"{self.operation.id}{name}", **known)


Make = Callable[[Site], Parts | None]
"""Returns parts that do the same as an operation; None for other operations."""


def unpromised(schedule: Schedule) -> Schedule:
    """Return the schedule without promises of memory and volume."""
    contract: Contract = replace(schedule.contract, peak_bytes=(), wire_bytes=None, host_bytes=None)
    return replace(schedule, contract=contract)


def spread(make: Make, text: str) -> Aim:
    """Return the operator that replaces the last operation that `make` takes, and all of them."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        ordered = [
            each.id
            for each in in_step(schedule)
            if any(
                make(Site(schedule, program, program.by_id[each.id])) is not None
                for program in schedule.programs
                if each.id in program.by_id
            )
        ]
        for chosen in (ordered[-1:], ordered)[len(ordered) < 2 :]:
            if chosen:
                found = everywhere(schedule, _replaced(schedule, chosen, make))
                yield Mutant.of(f"{text}, {len(chosen)} of {len(ordered)}", unpromised(found))

    return aim


def _replaced(schedule: Schedule, chosen: list[str], make: Make) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        buffers: list[Buffer] = []

        def parts_of(each: Operation) -> Iterable[Operation]:
            parts = make(Site(schedule, program, each)) if each.id in chosen else None
            if parts is None:
                return (each,)
            buffers.extend(parts[0])
            return parts[1]

        found = rewritten(program, parts_of, part="step")
        declared = with_buffer(replace(found, step=(), setup=()), *buffers)
        return replace(declared, step=found.step, setup=found.setup)

    return change


def held(buffer: Buffer, *operations: Operation) -> Parts:
    """Return operations on its home stream while a buffer is alive."""
    taken = Allocate(id=f"{buffer.name}/take", buffer=buffer.name)
    return [buffer], [taken, *operations, Free(id=f"{buffer.name}/give", buffer=buffer.name)]


def whole(buffer: Buffer) -> View:
    """Return all of a buffer."""
    return View(buffer=buffer.name, size=buffer.elements)


def are_plain(*views: View) -> bool:
    """Return True if views are the same on every rank."""
    return all(view.axis is None and view.layout is None for view in views)


def halves(view: View) -> tuple[View, View]:
    """Return both halves of a plain view."""
    half = view.size // 2
    return replace(view, size=half), replace(view, start=view.start + half, size=view.size - half)


def scattered_and_gathered(site: Site) -> Parts | None:
    """Reduce-scatter and all-gather for an all-reduce."""
    each = site.operation
    if not isinstance(each, AllReduce) or each.reduction is Reduction.MAX:
        return None
    count = site.schedule.group_by_name[each.group].size(site.schedule.mesh)
    if each.source.size % count or each.source.size < 2 or count < 2:
        return None
    shard = site.scratch(each.source, "shard", each.source.size // count)
    both = {"group": each.group, "wire": each.wire}
    first = site.first(
        ReduceScatter,
        "scatter",
        source=each.source,
        target=whole(shard),
        reduction=each.reduction,
        accumulate=each.accumulate,
        **both,
    )
    second = site.then(AllGather, source=whole(shard), target=each.target, **both)
    return held(shard, first, second)


def in_chunks(site: Site) -> Parts | None:
    """Two chunks of an all-reduce."""
    each = site.operation
    if not isinstance(each, AllReduce) or each.source.size < 2:
        return None
    if not are_plain(each.source, each.target):
        return None
    sources, targets = halves(each.source), halves(each.target)
    first = replace(each, id=f"{each.id}/first", source=sources[0], target=targets[0])
    return [], [first, replace(each, source=sources[1], target=targets[1])]


def on_a_copy(site: Site) -> Parts | None:
    """A reduction of a copy, which goes back."""
    each = site.operation
    if not isinstance(each, AllReduce) or each.source.size < 2:
        return None
    copy = site.scratch(each.source, "copy", each.source.size)
    there = site.first(Copy, "there", source=each.source, target=whole(copy))
    summed = replace(each, id=f"{each.id}/sum", after=(), source=whole(copy), target=whole(copy))
    return held(copy, there, summed, site.then(Copy, source=whole(copy), target=each.target))


def by_broadcasts(site: Site) -> Parts | None:
    """A broadcast of every rank for an all-gather."""
    each = site.operation
    if not isinstance(each, AllGather) or not are_plain(each.target):
        return None
    if each.source.buffer == each.target.buffer or not each.source.size:
        return None
    count = site.schedule.group_by_name[each.group].size(site.schedule.mesh)
    size = each.source.size
    return [], [
        site.then(
            Broadcast,
            "" if root == count - 1 else f"/{root}",
            after=each.after,
            group=each.group,
            source=each.source,
            target=replace(each.target, start=each.target.start + root * size, size=size),
            root=root,
            wire=each.wire,
        )
        for root in range(count)
    ]


def updated_in_halves(site: Site) -> Parts | None:
    """Two updates, of one half each."""
    each = site.operation
    if not isinstance(each, Compute) or each.action is not Action.UPDATE:
        return None
    views = [operand.view for operand in each.operands]
    if not are_plain(*views) or views[0].size < 2:
        return None
    made = [
        with_operands(each, (replace(one, view=halves(one.view)[number]) for one in each.operands))
        for number in (0, 1)
    ]
    return [], [replace(made[0], id=f"{each.id}/first"), made[1]]


def updated_by_windows(site: Site) -> Parts | None:
    """Three updates of a shard: of the rank's elements of each part of the whole tensor."""
    each = site.operation
    layout = sharded(site.schedule).get(each.id)
    if layout is None or not isinstance(each, Compute):
        return None
    bounds = (0, min(1, layout.elements), layout.elements * 2 // 3 + 1, layout.elements + 1)
    ends = [min(bound, layout.elements) for bound in bounds]
    return [], list(in_windows(each, layout, tuple(pairwise(ends))))


def through_scratch(site: Site) -> Parts | None:
    """A copy through a scratch buffer in the format of its source."""
    each = site.operation
    if not isinstance(each, Copy) or each.by_parameter or not each.source.size:
        return None
    if not are_plain(each.source, each.target):
        return None
    middle = site.scratch(each.source, "way", each.source.size)
    first = site.first(Copy, "out", source=each.source, target=whole(middle))
    return held(middle, first, replace(each, after=(), source=whole(middle)))


def summed_apart(site: Site) -> Parts | None:
    """A summand that is divided and rounded on its own first."""
    each = site.operation
    if not isinstance(each, Copy) or not each.accumulate or each.by_parameter:
        return None
    if not are_plain(each.source) or not each.source.size:
        return None
    own = site.scratch(each.target, "own", each.source.size)
    first = site.first(Copy, "apart", source=each.source, target=whole(own), divisor=each.divisor)
    return held(own, first, replace(each, after=(), source=whole(own), divisor=1))


def added_to_zero(site: Site) -> Parts | None:
    """A sum with zero for a copy."""
    each = site.operation
    if not isinstance(each, Copy) or each.accumulate or each.by_parameter:
        return None
    if each.source.buffer == each.target.buffer:
        return None
    zero = site.first(Fill, "zero", target=each.target, value=0.0)
    return [], [zero, replace(each, accumulate=True)]


def bucket_by_bucket(site: Site) -> Parts | None:
    """Sums of squares of one gradient after the other, added up."""
    each = site.operation
    if not isinstance(each, Compute) or each.action is not Action.NORM:
        return None
    gradients = of_role(each, Role.GRADIENT)
    (output,) = of_role(each, Role.OUTPUT)
    if len(gradients) < 2:
        return None
    own = site.scratch(output.view, "own", 1)
    part = replace(output, view=whole(own))
    found = [replace(with_operands(each, (gradients[0], output)), id=f"{each.id}/0")]
    for number, gradient in enumerate(gradients[1:], 1):
        name = "" if number == len(gradients) - 1 else f"/add{number}"
        found.append(replace(with_operands(each, (gradient, part)), id=f"{each.id}/{number}"))
        views = {"source": whole(own), "target": output.view}
        found.append(site.then(Copy, name, accumulate=True, **views))
    return held(own, *found)


def in_other_order(site: Site) -> Parts | None:
    """Gradients measured in another order, and one of them in halves."""
    each = site.operation
    if not isinstance(each, Compute) or each.action not in (Action.NORM, Action.FINITE):
        return None
    first, *rest = of_role(each, Role.GRADIENT)
    parts = [first]
    if are_plain(first.view) and first.view.size > 1:
        parts = [replace(first, view=half) for half in halves(first.view)]
    return [], [with_operands(each, (*reversed(rest), *parts, *of_role(each, Role.OUTPUT)))]


def as_a_group(site: Site) -> Parts | None:
    """A group of one collective."""
    each = site.operation
    if not isinstance(each, AllReduce | ReduceScatter | AllGather):
        return None
    member = replace(each, id=f"{each.id}/member", after=())
    return [], [Together(id=each.id, stream=each.stream, after=each.after, members=(member,))]


def gathered_twice(site: Site) -> Parts | None:
    """A gather done twice in a row."""
    each = site.operation
    if not isinstance(each, AllGather) or each.source.buffer == each.target.buffer:
        return None
    return [], [replace(each, id=f"{each.id}/once"), each]


def flags_added(schedule: Schedule) -> Iterator[Edit]:
    """Add up flags of overflow instead of comparing them."""
    names = {each.id for each in numbers_reduced(schedule, Action.FINITE)}

    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, AllReduce) and each.id in names:
            return (replace(each, reduction=Reduction.SUM),)
        return (each,)

    if names:
        made = everywhere(schedule, lambda program: rewritten(program, change))
        yield Mutant.of("flags added up", unpromised(made))


def identical_roles(schedule: Schedule) -> Iterator[Edit]:
    """Give one rank a role of its own in which it does the same."""
    for axis in schedule.mesh.axes:
        if axis.size > 1:
            try:
                made = apart(schedule, axis.name, 0, lambda program: program)
            except ValueError:
                continue
            yield Mutant.of(f"two roles along {axis.name}", unpromised(made))
