"""What aimed edits are made of: operations found by what they do, and changed in every role."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from edits.programs import Edit, added, apart, dropped, everywhere, moved, places, rewritten
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Compute,
    Copy,
    Operand,
    Operation,
    ReduceScatter,
    Role,
    walk,
)
from zsim.schedule.schedule import Kind, Program, Schedule

Aim = Callable[[Schedule], Iterator[Edit]]
"""Edits of one kind, of any schedule that can express them."""
Fits = Callable[[Operation], bool]


def in_step(schedule: Schedule) -> Iterator[Operation]:
    """Every operation of every step, each id once."""
    seen: set[str] = set()
    for program in schedule.programs:
        for operation in walk(program.step):
            if operation.id not in seen:
                seen.add(operation.id)
                yield operation


def in_setup(schedule: Schedule) -> Iterator[Operation]:
    """Every operation of every set-up, each id once."""
    seen: set[str] = set()
    for program in schedule.programs:
        for operation in walk(program.setup):
            if operation.id not in seen:
                seen.add(operation.id)
                yield operation


def computes(schedule: Schedule, action: Action) -> list[Compute]:
    """Operations of a step that do `action`."""
    return [
        each for each in in_step(schedule) if isinstance(each, Compute) and each.action is action
    ]


def of_role(compute: Compute, role: Role) -> list[Operand]:
    """Operands of one role."""
    return [each for each in compute.operands if each.role is role]


def kind_of(schedule: Schedule, buffer: str) -> Kind | None:
    """What a buffer is for, in the first role that has it."""
    for program in schedule.programs:
        if buffer in program.by_name:
            return program.by_name[buffer].kind
    return None


def through(
    schedule: Schedule, change: Callable[[Operation], Iterable[Operation] | None], text: str
) -> Iterator[Edit]:
    """The schedule with all that `change` changes changed, if there is something."""

    def rewrite(program: Program) -> Program:
        def each(operation: Operation) -> Iterable[Operation]:
            made = change(operation)
            return (operation,) if made is None else made

        return rewritten(program, each)

    yield from made(schedule, rewrite, text)


def made(schedule: Schedule, change: Callable[[Program], Program], text: str) -> Iterator[Edit]:
    """The schedule with every program changed, if it can be and differs."""
    try:
        found = everywhere(schedule, change)
    except ValueError:
        return
    if found != schedule:
        yield Edit(text, found)


def alone(schedule: Schedule, change: Callable[[Program], Program], text: str) -> Iterator[Edit]:
    """The schedule with the programs of one rank, along each axis, changed."""
    for axis, place in places(schedule):
        if place > 1:
            continue
        try:
            found = apart(schedule, axis, place, change)
        except ValueError:
            continue
        if [change(program) for program in schedule.programs] != list(schedule.programs):
            yield Edit(f"at {axis} {place} alone: {text}", found)


def one_by_one(
    schedule: Schedule,
    operations: Iterable[Operation],
    change: Callable[[Operation], Iterable[Operation]],
    text: str,
) -> Iterator[Edit]:
    """Schedules in which one of `operations` is changed."""
    for one in operations:
        yield from made(schedule, _at(one.id, change), f"{text}: {one.id}")


def _at(
    name: str, change: Callable[[Operation], Iterable[Operation]]
) -> Callable[[Program], Program]:
    """What changes operation `name` of a program."""
    return lambda program: rewritten(
        program, lambda each: change(each) if each.id == name else (each,)
    )


def becomes(*others: Operation) -> Callable[[Operation], tuple[Operation, ...]]:
    """What replaces any operation by `others`."""
    return lambda _: others


def drops(*names: str) -> Callable[[Program], Program]:
    """What takes operations out of a program."""
    return lambda program: dropped(program, *names)


def adds(
    operation: Operation, *, before: str = "", after: str = ""
) -> Callable[[Program], Program]:
    """What puts an operation beside another one."""
    return lambda program: added(program, operation, before=before, after=after)


def moves(name: str, *, before: str = "", after: str = "") -> Callable[[Program], Program]:
    """What moves an operation beside another one, in programs that have both."""

    def change(program: Program) -> Program:
        if not {name, before or after} <= set(program.by_id):
            return program
        return moved(program, name, before=before, after=after)

    return change


def over_ranks(schedule: Schedule) -> list[AllReduce | ReduceScatter]:
    """Reductions of gradients over ranks that see other data."""
    found: list[AllReduce | ReduceScatter] = []
    for each in in_step(schedule):
        if isinstance(each, AllReduce | ReduceScatter) and each.source.size > 1:
            axes = schedule.group_by_name[each.group].axes
            if set(axes) & set(schedule.contract.data_axes):
                found.append(each)
    return found


def inside_units(schedule: Schedule) -> list[AllReduce]:
    """All-reduces over ranks that share the work on the same data."""
    return [
        each
        for each in in_step(schedule)
        if isinstance(each, AllReduce)
        and each.source.size > 1
        and not set(schedule.group_by_name[each.group].axes) & set(schedule.contract.data_axes)
    ]


def contributions(schedule: Schedule) -> list[Copy]:
    """Copies that are on the way of gradients."""
    kinds = (Kind.GRADIENT, Kind.WORKSPACE, Kind.COMMUNICATION)
    written = {
        each.view.buffer
        for backward in computes(schedule, Action.BACKWARD)
        for each in of_role(backward, Role.GRADIENT)
    }
    found: list[Copy] = []
    for each in in_step(schedule):
        if isinstance(each, Copy) and each.source.buffer in written:
            if kind_of(schedule, each.target.buffer) in kinds:
                written.add(each.target.buffer)
                found.append(each)
        elif isinstance(each, AllReduce | ReduceScatter) and each.source.buffer in written:
            written.add(each.target.buffer)
    return found


def writers(schedule: Schedule, buffer: str) -> list[Operation]:
    """Operations of the step that write a buffer."""
    return [
        each
        for each in in_step(schedule)
        if any(access.writes and access.view.buffer == buffer for access in accesses(each))
    ]


def with_operands(compute: Compute, operands: Iterable[Operand]) -> Compute:
    """The operation with other operands."""
    return replace(compute, operands=tuple(operands))


def again(operation: Operation, suffix: str = "again") -> Operation:
    """A copy of an operation under another id."""
    return replace(operation, id=f"{operation.id}/{suffix}")
