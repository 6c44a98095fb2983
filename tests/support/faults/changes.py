"""Operators on schedules: which operations change, into what, in one place, in all, at one rank."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from faults.fault import Mutant, Operator
from faults.schedules import (
    ProgramChange,
    added,
    again,
    apart,
    dropped,
    everywhere,
    places,
    rewritten,
    shifted,
)
from faults.selections import in_step
from zsim.schedule.operation import Operation
from zsim.schedule.schedule import Program, Schedule

Aim = Operator[Schedule, Schedule]
Edit = Mutant[Schedule]
Select = Callable[[Schedule], Iterable[Operation]]
Replace = Callable[[Any], Iterable[Operation]]
"""The operations in place of one that was selected."""


def made(schedule: Schedule, change: ProgramChange, text: str) -> Iterator[Edit]:
    """Yield the schedule with every program changed, if it can be made and differs."""
    try:
        found = everywhere(schedule, change)
    except ValueError:
        return
    if found != schedule:
        yield Mutant.of(text, found)


def alone(schedule: Schedule, change: ProgramChange, text: str) -> Iterator[Edit]:
    """Yield the schedule with the programs of one rank, along each axis, changed."""
    for axis, place in places(schedule):
        if place > 1:
            continue
        try:
            found = apart(schedule, axis, place, change)
        except ValueError:
            continue
        if [change(program) for program in schedule.programs] != list(schedule.programs):
            yield Mutant.of(f"at {axis} {place} alone: {text}", found)


def through(
    schedule: Schedule, change: Callable[[Operation], Iterable[Operation] | None], text: str
) -> Iterator[Edit]:
    """Yield the schedule with every operation changed of which `change` returns others."""

    def each(operation: Operation) -> Iterable[Operation]:
        found = change(operation)
        return (operation,) if found is None else found

    yield from made(schedule, lambda program: rewritten(program, each), text)


def one_by_one(
    schedule: Schedule, operations: Iterable[Operation], change: Replace, text: str
) -> Iterator[Edit]:
    """Yield schedules in which one of `operations` is changed."""
    for one in operations:
        yield from made(schedule, _at({one.id}, change), f"{text}: {one.id}")


def _at(names: set[str], change: Replace) -> ProgramChange:
    return lambda program: rewritten(
        program, lambda each: change(each) if each.id in names else (each,)
    )


def at(select: Select, change: Replace, text: str) -> Aim:
    """Return the operator that changes one of the selected operations."""
    return lambda schedule: one_by_one(schedule, select(schedule), change, text)


def in_all(select: Select, change: Replace, text: str) -> Aim:
    """Return the operator that changes all selected operations."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        names = {each.id for each in select(schedule)}
        if names:
            yield from made(schedule, _at(names, change), f"{text} in {len(names)}")

    return aim


def of_kind(*kinds: type[Operation]) -> Select:
    """Return the selection of operations of a step by their class."""
    return lambda schedule: [each for each in in_step(schedule) if isinstance(each, kinds)]


def gone(_: Operation) -> tuple[Operation, ...]:
    """Leave an operation out."""
    return ()


def doubled(each: Operation) -> tuple[Operation, ...]:
    """Do an operation twice."""
    return each, again(each)


def becomes(*others: Operation) -> Callable[[Operation], tuple[Operation, ...]]:
    """Return the change of any operation into `others`."""
    return lambda _: others


def drops(*names: str) -> ProgramChange:
    """Return the change that takes operations out of a program."""
    return lambda program: dropped(program, *names)


def adds(operation: Operation, *, before: str = "", after: str = "") -> ProgramChange:
    """Return the change that puts an operation next to another one."""
    return lambda program: added(program, operation, before=before, after=after)


def moves(name: str, *, before: str = "", after: str = "") -> ProgramChange:
    """Return the change that moves an operation next to another one, in programs with both."""

    def change(program: Program) -> Program:
        if not {name, before or after} <= set(program.by_id):
            return program
        return shifted(program, name, before=before, after=after)

    return change
