"""Programs taken apart and put together again: operations by id, replaced, added, left out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from zsim.schedule.access import accesses
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Branch, Operation, Previous, View, walk
from zsim.schedule.schedule import Buffer, Program, RankRole, Schedule

T = TypeVar("T")
Change = Callable[[Operation], Iterable[Operation]]
"""What stands in place of an operation: itself, nothing, several."""


@dataclass(frozen=True)
class Edit:
    """A schedule that was changed, and how, in words."""

    text: str
    schedule: Schedule


def one_of(rng: np.random.Generator, choices: Iterable[T]) -> T:
    """One of `choices`, drawn.

    Raises:
        ValueError: there are none.
    """
    found = list(choices)
    if not found:
        raise ValueError("nothing to choose from")
    return found[int(rng.integers(len(found)))]


def rewritten(program: Program, change: Change, *, part: str = "") -> Program:
    """The program with every operation, of `part` or of both, put through `change`."""

    def through(operations: Iterable[Operation]) -> tuple[Operation, ...]:
        found: list[Operation] = []
        for operation in operations:
            if isinstance(operation, Branch):
                sides = through(operation.then), through(operation.otherwise)
                found.extend(change(replace(operation, then=sides[0], otherwise=sides[1])))
            else:
                found.extend(change(operation))
        return tuple(found)

    setup = program.setup if part == "step" else through(program.setup)
    step = program.step if part == "setup" else through(program.step)
    return cleaned(program, setup, step)


def cleaned(program: Program, setup: tuple[Operation, ...], step: tuple[Operation, ...]) -> Program:
    """The program with other operations, of which none waits for what comes later, or is gone."""
    everything = {each.id for each in (*walk(setup), *walk(step))}

    def through(operations: Iterable[Operation], known: set[str]) -> tuple[Operation, ...]:
        found: list[Operation] = []
        for operation in operations:
            changes: dict[str, Any] = {}
            for field in ("after", "uses"):
                edges = getattr(operation, field, ())
                kept = tuple(
                    edge
                    for edge in edges
                    if (
                        edge.operation in everything
                        if isinstance(edge, Previous)
                        else edge in known
                    )
                )
                if kept != edges:
                    changes[field] = kept
            if isinstance(operation, Branch):
                changes["then"] = through(operation.then, known)
                changes["otherwise"] = through(operation.otherwise, known)
            known.add(operation.id)
            found.append(replace(operation, **changes) if changes else operation)
        return tuple(found)

    return replace(program, setup=through(setup, set()), step=through(step, set()))


def replaced(program: Program, name: str, *others: Operation) -> Program:
    """The program with `others` in place of operation `name`."""
    return rewritten(program, lambda each: others if each.id == name else (each,))


def dropped(program: Program, *names: str) -> Program:
    """The program without operations `names`, and without edges to them."""
    return rewritten(program, lambda each: () if each.id in names else (each,))


def added(program: Program, operation: Operation, *, before: str = "", after: str = "") -> Program:
    """The program with `operation` beside another one."""

    def change(each: Operation) -> Iterable[Operation]:
        if each.id == before:
            return (operation, each)
        return (each, operation) if each.id == after else (each,)

    return rewritten(program, change)


def moved(program: Program, name: str, *, before: str = "", after: str = "") -> Program:
    """The program with operation `name` beside another one."""
    operation = program.by_id[name]
    return added(dropped(program, name), operation, before=before, after=after)


def with_program(schedule: Schedule, program: Program) -> Schedule:
    """The schedule in which the role of `program` runs it."""
    programs = tuple(program if each.role == program.role else each for each in schedule.programs)
    return replace(schedule, programs=programs)


def everywhere(schedule: Schedule, change: Callable[[Program], Program]) -> Schedule:
    """The schedule with every program changed."""
    return replace(schedule, programs=tuple(map(change, schedule.programs)))


def changed(schedule: Schedule, change: Change) -> Schedule:
    """The schedule with every operation of every role put through `change`."""
    return everywhere(schedule, lambda program: rewritten(program, change))


def with_buffer(program: Program, buffer: Buffer) -> Program:
    """The program that declares one buffer more."""
    return replace(program, buffers=(*program.buffers, buffer))


def places(schedule: Schedule) -> list[tuple[str, int]]:
    """Axes along which there are several ranks, and the places along each."""
    return [
        (axis.name, place)
        for axis in schedule.mesh.axes
        if axis.size > 1
        for place in range(axis.size)
    ]


def apart(
    schedule: Schedule, axis: str, place: int, change: Callable[[Program], Program]
) -> Schedule:
    """The schedule in which ranks at `place` along `axis` run other programs.

    Raises:
        ValueError: roles are told apart along that axis already.
    """
    size = schedule.mesh.axis_size(axis)
    roles: list[RankRole] = []
    programs: list[Program] = []
    for role, program in zip(schedule.roles, schedule.programs, strict=True):
        if any(span.axis == axis for box in role.boxes for span in box):
            raise ValueError(f"{role.name} is told apart along {axis}")
        own = tuple((*box, Span(axis=axis, start=place, end=place + 1)) for box in role.boxes)
        ends = [(0, place), (place + 1, size)]
        rest = tuple(
            (*box, Span(axis=axis, start=low, end=high))
            for box in role.boxes
            for low, high in ends
            if low < high
        )
        names = f"{role.name} one", f"{role.name} rest"
        roles += [RankRole(name=names[0], boxes=own), RankRole(name=names[1], boxes=rest)]
        programs += [replace(change(program), role=names[0]), replace(program, role=names[1])]
    return replace(
        schedule,
        roles=tuple(roles),
        programs=tuple(programs),
        contract=replace(schedule.contract, peak_bytes=(), wire_bytes=None),
    )


def alive(program: Program) -> Iterator[tuple[str, View]]:
    """Views that operations of the step touch, with the operation."""
    for operation in walk(program.step):
        for access in accesses(operation):
            yield operation.id, access.view
