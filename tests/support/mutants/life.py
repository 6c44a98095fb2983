"""Memory lives too short, too long, under two names, or is used again on another stream."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from mutation import edited, moved, without

from mutants.mutant import Mutant, Operator, in_step, only_program
from zsim.schedule.access import accesses
from zsim.schedule.operation import Allocate, Compute, Free, Operand, Operation, Together, View
from zsim.schedule.schedule import Buffer, Program, Schedule

ALIASES_MAX = 60
"""Pairs of buffers that are put into one, of those that could be."""


def early(schedule: Schedule) -> Iterator[Mutant]:
    """A free stands before the last use, or before the last but one."""
    operations = list(in_step(schedule))
    for place, free in enumerate(operations):
        if not isinstance(free, Free):
            continue
        users = [
            each
            for each in operations[:place]
            if any(access.view.buffer == free.buffer for access in accesses(each))
        ]
        for user in users[-1:-3:-1]:
            make = partial(_freed_before, schedule, free, user, operations)
            yield Mutant((free.id, user.id, free.buffer), make)


def _freed_before(
    schedule: Schedule, free: Free, user: Operation, operations: list[Operation]
) -> Schedule:
    """Uses that are issued after the free cannot be waited for."""
    before = {each.id for each in operations[: operations.index(user)]}
    kept = tuple(use for use in free.uses if use in before)
    changed = edited(
        schedule, lambda each: (replace(free, uses=kept) if each.id == free.id else each,)
    )
    return moved(changed, free.id, before=user.id)


def never(schedule: Schedule) -> Iterator[Mutant]:
    for operation in in_step(schedule):
        if isinstance(operation, Free):
            make = partial(without, schedule, operation.id)
            yield Mutant((operation.id, operation.buffer), make)


def aliases(schedule: Schedule) -> Iterator[Mutant]:
    """Two transient buffers that look alike are one: the second takes the memory of the first."""
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
        yield Mutant((first.name, second.name), partial(_as_one, schedule, first, second))


def _lifetimes(program: Program) -> dict[str, list[tuple[int, int]]]:
    """When each transient buffer is alive, by places in the order of issue."""
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
    """What the second buffer is used for happens in the first, which keeps its own life."""

    def renamed(view: View) -> View:
        return replace(view, buffer=first.name) if view.buffer == second.name else view

    def edit(each: Operation) -> Iterable[Operation]:
        if isinstance(each, Allocate | Free) and each.buffer == second.name:
            return ()
        return (_with_views(each, renamed),)

    return edited(schedule, edit)


def _with_views(operation: Operation, change: Any) -> Operation:  # noqa: ANN401 (a function of views)
    """The operation on other views."""
    if isinstance(operation, Together):
        members: Any = tuple(_with_views(member, change) for member in operation.members)
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


def homes(schedule: Schedule) -> Iterator[Mutant]:
    """Memory is used again in the order of another stream; frees wait for nothing beside it."""
    program = only_program(schedule)
    frees = {each.buffer: each for each in in_step(schedule) if isinstance(each, Free)}
    for buffer in program.buffers:
        if buffer.name not in frees:
            continue
        for stream in schedule.streams:
            if stream != buffer.home:
                where = (buffer.name, frees[buffer.name].id)
                yield Mutant(where, partial(_at_home, schedule, buffer, stream))


def _at_home(schedule: Schedule, buffer: Buffer, stream: str) -> Schedule:
    (program,) = schedule.programs
    buffers = tuple(
        replace(each, home=stream) if each is buffer else each for each in program.buffers
    )
    return replace(schedule, programs=(replace(program, buffers=buffers),))


LIFE = frozenset({"lifetime", "races", "definedness", "memory", "value", "placement"})
FREE_EARLY = Operator("free early", LIFE, early)
NEVER_FREE = Operator("never free", LIFE, never)
ALIAS = Operator("alias two buffers", LIFE | {"completeness", "partition"}, aliases)
OTHER_HOME = Operator("reuse a buffer across streams", LIFE, homes)
