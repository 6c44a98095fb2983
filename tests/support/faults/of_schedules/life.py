"""Memory that lives too short, too long, under two names, or is used again on another stream."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

from faults.changes import Edit
from faults.fault import Mutant
from faults.schedules import edited, moved, with_program, without
from faults.selections import in_step, only_program
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Allocate,
    Compute,
    Free,
    Operand,
    Operation,
    Together,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Program, Schedule

ALIASES_MAX = 60
"""Pairs of buffers that are put into one, of those that could be."""


def frees(schedule: Schedule) -> list[Free]:
    return [each for each in in_step(schedule) if isinstance(each, Free)]


def freed_early(schedule: Schedule) -> Iterator[Edit]:
    """Free before the last use, or before the last but one."""
    operations = in_step(schedule)
    for free in frees(schedule):
        users = [
            each
            for each in operations[: operations.index(free)]
            if any(access.view.buffer == free.buffer for access in accesses(each))
        ]
        for user in users[-1:-3:-1]:
            make = partial(_freed_before, schedule, free, user)
            yield Mutant(f"{free.id} before {user.id}", make, (free.id, user.id, free.buffer))


def _freed_before(schedule: Schedule, free: Free, user: Operation) -> Schedule:
    """Free before a use, without waiting for uses that are issued later."""
    operations = in_step(schedule)
    before = {each.id for each in operations[: operations.index(user)]}
    less = replace(free, uses=tuple(use for use in free.uses if use in before))
    changed = edited(schedule, lambda each: (less if each.id == free.id else each,))
    return moved(changed, free.id, before=user.id)


def never_freed(schedule: Schedule) -> Iterator[Edit]:
    for free in frees(schedule):
        yield Mutant(f"no {free.id}", partial(without, schedule, free.id), (free.id, free.buffer))


def aliased(schedule: Schedule) -> Iterator[Edit]:
    """Put two transient buffers that look alike into the memory of the first."""
    program = only_program(schedule)
    alive = _lifetimes(program)
    pairs = [
        (one, other)
        for one, other in combinations(program.buffers, 2)
        if one.name in alive
        and other.name in alive
        and (one.elements, one.dtype, one.pool) == (other.elements, other.dtype, other.pool)
        and one.elements
        and _overlap(alive[one.name], alive[other.name])
    ]
    for one, other in pairs[:: max(1, len(pairs) // ALIASES_MAX)]:
        first, second = (one, other) if alive[one.name][0] <= alive[other.name][0] else (other, one)
        make = partial(_as_one, schedule, first, second)
        yield Mutant(f"{second.name} in {first.name}", make, (first.name, second.name))


def _lifetimes(program: Program) -> dict[str, list[tuple[int, int]]]:
    """Return the lives of each transient buffer, by places in the order of issue."""
    begun: dict[str, int] = {}
    found: dict[str, list[tuple[int, int]]] = {}
    for place, operation in enumerate(program.by_id.values()):
        if isinstance(operation, Allocate):
            begun[operation.buffer] = place
        elif isinstance(operation, Free) and operation.buffer in begun:
            found.setdefault(operation.buffer, []).append((begun[operation.buffer], place))
    return found


def _overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> bool:
    return any(a < d and c < b for a, b in one for c, d in other)


def _as_one(schedule: Schedule, first: Buffer, second: Buffer) -> Schedule:
    """Return the schedule that uses the first buffer, which keeps its own life, for the second."""

    def edit(each: Operation) -> Iterable[Operation]:
        if isinstance(each, Allocate | Free) and each.buffer == second.name:
            return ()
        return (in_buffer(each, second.name, first.name),)

    return edited(schedule, edit)


def in_buffer(operation: Operation, old: str, new: str) -> Operation:
    """Return the operation on another buffer in place of one."""
    return with_views(
        operation, lambda view: replace(view, buffer=new) if view.buffer == old else view
    )


def with_views(operation: Operation, change: Callable[[View], View]) -> Operation:
    """Return the operation on other views."""
    if isinstance(operation, Together):
        members: Any = tuple(with_views(member, change) for member in operation.members)
        return replace(operation, members=members)
    if isinstance(operation, Compute):
        operands: list[Operand] = [
            replace(operand, view=change(operand.view)) for operand in operation.operands
        ]
        return replace(operation, operands=tuple(operands))
    fields: dict[str, Any] = {
        name: change(getattr(operation, name))
        for name in ("source", "target")
        if isinstance(getattr(operation, name, None), View)
    }
    return replace(operation, **fields) if fields else operation


def used_again_elsewhere(schedule: Schedule) -> Iterator[Edit]:
    """Use memory again in the order of another stream, for which no free waits."""
    program = only_program(schedule)
    freed = {each.buffer: each for each in frees(schedule)}
    for buffer in program.buffers:
        for stream in schedule.streams if buffer.name in freed else ():
            if stream != buffer.home:
                where = buffer.name, freed[buffer.name].id
                make = partial(_at_home, schedule, buffer, stream)
                yield Mutant(f"{buffer.name} is at home on {stream}", make, where)


def _at_home(schedule: Schedule, buffer: Buffer, stream: str) -> Schedule:
    program = only_program(schedule)
    buffers = tuple(
        replace(each, home=stream) if each is buffer else each for each in program.buffers
    )
    return with_program(schedule, replace(program, buffers=buffers))
