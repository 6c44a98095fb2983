"""Operations of a schedule found by what they do."""

from collections.abc import Iterable, Iterator

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
    StreamOperation,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Program, Schedule


def only_program(schedule: Schedule) -> Program:
    """Return the program of the only role."""
    (program,) = schedule.programs
    return program


def in_step(schedule: Schedule) -> list[Operation]:
    """Return every operation of every step, both lists of a branch too, each id once."""
    return _once(each for program in schedule.programs for each in walk(program.step))


def in_setup(schedule: Schedule) -> list[Operation]:
    """Return every operation of every set-up, each id once."""
    return _once(each for program in schedule.programs for each in walk(program.setup))


def _once(operations: Iterable[Operation]) -> list[Operation]:
    found: dict[str, Operation] = {}
    for each in operations:
        found.setdefault(each.id, each)
    return list(found.values())


def on_streams(schedule: Schedule) -> list[StreamOperation]:
    """Return every operation of the step that runs on a stream."""
    return [each for each in in_step(schedule) if isinstance(each, StreamOperation)]


def computes(schedule: Schedule, *actions: Action) -> list[Compute]:
    """Return operations of a step that do one of `actions`."""
    return [
        each for each in in_step(schedule) if isinstance(each, Compute) and each.action in actions
    ]


def of_role(compute: Compute, role: Role) -> list[Operand]:
    """Return operands of one role."""
    return [each for each in compute.operands if each.role is role]


def with_operands(compute: Compute, operands: Iterable[Operand]) -> Compute:
    """Return the operation with other operands."""
    return replace(compute, operands=tuple(operands))


def kind_of(schedule: Schedule, buffer: str) -> Kind | None:
    """Return the kind of a buffer in the first role that has it."""
    for program in schedule.programs:
        if buffer in program.by_name:
            return program.by_name[buffer].kind
    return None


def touched(operation: Operation) -> tuple[str, ...]:
    """Return the operation's id and the buffers that it touches."""
    return (operation.id, *(each.view.buffer for each in accesses(operation)))


def writers(schedule: Schedule, buffer: str) -> list[Operation]:
    """Return operations of the step that write a buffer."""
    return [
        each
        for each in in_step(schedule)
        if any(access.writes and access.view.buffer == buffer for access in accesses(each))
    ]


def updates(schedule: Schedule) -> list[Compute]:
    """Return updates of a step."""
    return computes(schedule, Action.UPDATE)


def over_ranks(schedule: Schedule) -> list[AllReduce | ReduceScatter]:
    """Return reductions of gradients over ranks that see other data."""
    return [each for each in _reductions(schedule) if _shares_data(schedule, each)]


def inside_units(schedule: Schedule) -> list[AllReduce]:
    """Return all-reduces over ranks that share the work on the same data."""
    return [
        each
        for each in _reductions(schedule)
        if isinstance(each, AllReduce) and not _shares_data(schedule, each)
    ]


def _reductions(schedule: Schedule) -> Iterator[AllReduce | ReduceScatter]:
    for each in in_step(schedule):
        if isinstance(each, AllReduce | ReduceScatter) and each.source.size > 1:
            yield each


def _shares_data(schedule: Schedule, each: AllReduce | ReduceScatter) -> bool:
    axes = schedule.group_by_name[each.group].axes
    return bool(set(axes) & set(schedule.contract.data_axes))


def contributions(schedule: Schedule) -> list[Copy]:
    """Return copies that are on the way of gradients."""
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


def numbers_reduced(schedule: Schedule, action: Action) -> list[AllReduce]:
    """Return reductions of the number that operations of one action make."""
    numbers = {
        operand.view.buffer
        for each in computes(schedule, action)
        for operand in of_role(each, Role.OUTPUT)
    }
    return [
        each
        for each in in_step(schedule)
        if isinstance(each, AllReduce) and each.source.buffer in numbers
    ]
