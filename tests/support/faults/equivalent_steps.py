"""Equivalents of a whole step: divisors elsewhere, another order of issue, other names."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

from faults.changes import Aim, Edit
from faults.equivalents import (
    added_to_zero,
    as_a_group,
    bucket_by_bucket,
    by_broadcasts,
    flags_added,
    gathered_twice,
    identical_roles,
    in_chunks,
    in_other_order,
    on_a_copy,
    scattered_and_gathered,
    spread,
    summed_apart,
    through_scratch,
    unpromised,
    updated_by_windows,
    updated_in_halves,
)
from faults.fault import Mutant
from faults.field_names import field_names
from faults.schedules import added, cleaned, everywhere, rewritten
from faults.selections import computes, contributions, numbers_reduced, of_role, over_ranks
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Branch,
    Compute,
    Copy,
    Operation,
    ReduceScatter,
    Reduction,
    Role,
    StreamOperation,
    View,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule


def undivided(schedule: Schedule) -> tuple[Schedule, int] | None:
    """The schedule in which no gradient is divided on its way, and by what they were.

    None if gradients are divided in several places, or by several numbers.
    """
    copies = [each for each in contributions(schedule) if each.divisor > 1]
    divisors = {each.divisor for each in copies}
    written = {each.target.buffer for each in copies}
    again = any(each.source.buffer in written for each in copies)
    means = any(each.reduction is not Reduction.SUM for each in over_ranks(schedule))
    if len(divisors) != 1 or again or means or not over_ranks(schedule):
        return None
    names = {each.id for each in copies}

    def change(program: Program) -> Program:
        return rewritten(
            program,
            lambda each: (
                (replace(each, divisor=1),)
                if isinstance(each, Copy) and each.id in names
                else (each,)
            ),
        )

    return everywhere(schedule, change), divisors.pop()


def divided(name: str, stream: str, view: View, divisor: int) -> Copy:
    """What divides a view in place."""
    return Copy(id=name, stream=stream, source=view, target=view, divisor=divisor)


def last_reductions(schedule: Schedule) -> list[AllReduce | ReduceScatter]:
    """Reductions whose result is not reduced again."""
    reductions = over_ranks(schedule)
    sources = {each.source.buffer for each in reductions}
    return [
        each
        for each in reductions
        if each.target.buffer == each.source.buffer or each.target.buffer not in sources
    ]


def divided_after(schedule: Schedule) -> Iterator[Edit]:
    """All ranks divide what was reduced, not what they bring: in place, or through scratch."""
    found = undivided(schedule)
    groups = {each.group for each in over_ranks(schedule)}
    if found is None or len(groups) > 1:
        return
    plain, divisor = found
    reductions = last_reductions(plain)

    def in_place(program: Program) -> Program:
        for each in reductions:
            if each.id in program.by_id:
                own = divided(f"{each.id}/divide", each.stream, each.target, divisor)
                program = _after(program, each, own)
        return program

    yield Mutant.of("divided in place after reductions", unpromised(everywhere(plain, in_place)))


def _after(program: Program, before: StreamOperation, operation: Copy) -> Program:
    """The program with `operation` in the name of the one before it, so that others wait for it."""
    first: Any = replace(cast("Any", before), id=f"{before.id}/first")
    second = replace(operation, id=before.id)
    return rewritten(program, lambda each: (first, second) if each.id == before.id else (each,))


def measured_undivided(schedule: Schedule) -> Iterator[Edit]:
    """Squares of undivided gradients are added up and divided by N squared afterwards."""
    found = undivided(schedule)
    norms = computes(schedule, Action.NORM)
    if found is None or len(norms) != 1:
        return
    plain, divisor = found
    (norm,) = norms
    names = dict.fromkeys(each.view.buffer for each in of_role(norm, Role.GRADIENT))
    (total,) = numbers_reduced(plain, Action.NORM)
    updates = computes(plain, Action.UPDATE)

    def change(program: Program) -> Program:
        if norm.id not in program.by_id:
            return program
        squared = divided(f"{total.id}/divide", norm.stream, total.target, divisor**2)
        program = added(program, replace(squared, after=(total.id,)), after=total.id)
        for number, name in reversed(list(enumerate(names))):
            view = View(buffer=name, size=program.by_name[name].elements)
            own = divided(f"{norm.id}/divide{number}", norm.stream, view, divisor)
            program = added(program, own, after=norm.id)
        return program

    if updates:
        yield Mutant.of("squares of undivided gradients", unpromised(everywhere(plain, change)))


def mean_for_sum(schedule: Schedule) -> Iterator[Edit]:
    """Reductions take means of gradients that are divided by fewer."""
    found = undivided(schedule)
    groups = {each.group for each in over_ranks(schedule)}
    if found is None or len(groups) != 1:
        return
    count = schedule.group_by_name[groups.pop()].size(schedule.mesh)
    plain, divisor = found
    if divisor % count:
        return
    means = {each.id for each in over_ranks(plain)}
    copies = {each.id for each in contributions(schedule) if each.divisor > 1}

    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, AllReduce | ReduceScatter) and each.id in means:
            return (replace(each, reduction=Reduction.AVERAGE),)
        if isinstance(each, Copy) and each.id in copies:
            return (replace(each, divisor=divisor // count),)
        return (each,)

    made = everywhere(plain, lambda program: rewritten(program, change))
    yield Mutant.of("means", unpromised(made))


def clipped_before_unscaled(schedule: Schedule) -> Iterator[Edit]:
    """Gradients are clipped, then unscaled: both are factors."""

    def change(program: Program) -> Program:
        found = list(walk(program.step))
        for one, other in pairwise(found):
            if (
                isinstance(one, Compute)
                and isinstance(other, Compute)
                and (one.action, other.action) == (Action.UNSCALE, Action.CLIP)
            ):
                before = {one.id: (replace(other, after=(*one.after, *other.after)),)}
                after = {other.id: (replace(one, after=()),)}
                swap: dict[str, tuple[Operation, ...]] = {**before, **after}
                program = rewritten(program, lambda each: swap.get(each.id, (each,)))  # noqa: B023 (used at once)
        return program

    made = everywhere(schedule, change)
    if made != schedule:
        yield Mutant.of("clipped before unscaled", unpromised(made))


def issued_otherwise(schedule: Schedule) -> Iterator[Edit]:
    """Neighbours on different streams that do not wait for each other change places."""

    def through(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        found = list(operations)
        place = 0
        while place + 1 < len(found):
            one, other = found[place : place + 2]
            if _are_independent(one, other):
                found[place], found[place + 1] = other, one
                place += 1
            place += 1
        return tuple(
            replace(each, then=through(each.then), otherwise=through(each.otherwise))
            if isinstance(each, Branch)
            else each
            for each in found
        )

    def change(program: Program) -> Program:
        return cleaned(program, program.setup, through(program.step))

    made = everywhere(schedule, change)
    if made != schedule:
        yield Mutant.of("issued in another order", unpromised(made))


def _are_independent(one: Operation, other: Operation) -> bool:
    if not isinstance(one, StreamOperation) or not isinstance(other, StreamOperation):
        return False
    groups = getattr(one, "group", ""), getattr(other, "group", None)
    return one.stream != other.stream and one.id not in other.after and groups[0] != groups[1]


def renamed(schedule: Schedule) -> Iterator[Edit]:
    """Operations, buffers, layouts, streams, groups, pools have other names."""
    names: set[str] = {*schedule.streams}
    for kind in (schedule.groups, schedule.layouts, schedule.pools):
        names |= {each.name for each in kind}
    for program in schedule.programs:
        names |= {each.name for each in program.buffers} | set(program.by_id)
    names -= {each.name for each in schedule.contract.parameters}
    names -= {axis.name for axis in schedule.mesh.axes} | {each.name for each in schedule.scalars}
    numbers = {name: f"n{number}" for number, name in enumerate(sorted(names))}
    yield Mutant.of("other names", unpromised(cast("Schedule", _renamed(schedule, numbers))))


AXES = frozenset({"axis", "shard", "axes", "data_axes", "unit", "parameter", "role", "mesh"})


def _renamed(value: object, names: dict[str, str]) -> object:
    if isinstance(value, str) and type(value) is str:
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(_renamed(each, names) for each in cast("tuple[object, ...]", value))
    changes = {
        name: _renamed(getattr(value, name), names)
        for name in field_names(value)
        if name not in AXES
    }
    return replace(value, **changes) if changes else value


EQUIVALENTS: dict[str, Aim] = {
    "all-reduce as reduce-scatter and all-gather": spread(
        scattered_and_gathered, "scattered and gathered"
    ),
    "all-reduce in chunks": spread(in_chunks, "in chunks"),
    "all-reduce on a copy": spread(on_a_copy, "on a copy"),
    "all-gather by broadcasts": spread(by_broadcasts, "by broadcasts"),
    "collective as a group of one": spread(as_a_group, "as a group"),
    "gathered twice": spread(gathered_twice, "gathered twice"),
    "update in halves": spread(updated_in_halves, "in halves"),
    "update by windows": spread(updated_by_windows, "by windows"),
    "copies through scratch": spread(through_scratch, "through scratch"),
    "summands divided apart": spread(summed_apart, "apart"),
    "copies added to zero": spread(added_to_zero, "added to zero"),
    "norm bucket by bucket": spread(bucket_by_bucket, "bucket by bucket"),
    "gradients measured in another order": spread(in_other_order, "in other order"),
    "flags added up": flags_added,
    "divided after the reduction": divided_after,
    "squares of undivided gradients": measured_undivided,
    "means for sums": mean_for_sum,
    "clipped before unscaled": clipped_before_unscaled,
    "issued in another order": issued_otherwise,
    "two roles that do the same": identical_roles,
    "other names": renamed,
}
"""Ways to do the same."""
