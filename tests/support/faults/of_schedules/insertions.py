"""Operations that are added, repeated, moved, or left out."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant, one_of
from faults.of_schedules.fields import edited, pool_of
from faults.schedules import added, alive, dropped, replaced, shifted, with_program
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    Branch,
    Broadcast,
    Compute,
    Copy,
    Fill,
    HostWait,
    Operation,
    ReduceScatter,
    SetScalar,
    Together,
    View,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

TWICE = (Compute, Copy, AllReduce, ReduceScatter, AllGather, Broadcast, SetScalar)
VALUES = (0.0, 1.0, -1.0, 2.0, 0.5)


def renamed(operation: Operation, name: str) -> Operation:
    """Return a copy of an operation, and of its members, under another id."""
    if isinstance(operation, Together):
        members = tuple(
            replace(each, id=f"{name}/{number}") for number, each in enumerate(operation.members)
        )
        return replace(operation, id=name, members=members)
    return replace(operation, id=name)


def of_step(program: Program) -> list[Operation]:
    """Return operations of the step that are no branch."""
    return [each for each in walk(program.step) if not isinstance(each, Branch)]


def insert_copy(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Add an operation of the step a second time, somewhere, changed or as it was."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, of_step(program))
    at = one_of(rng, of_step(program)).id
    made, text = renamed(operation, f"{operation.id}/again"), ""
    if rng.random() < 0.5:
        text, made = edited(made, pool_of(schedule), rng)
    return Mutant.of(
        f"{operation.id} again before {at} {text}",
        with_program(schedule, added(program, made, before=at)),
    )


def repeat(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Compute, copy or communicate twice in a row."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, (each for each in of_step(program) if isinstance(each, TWICE)))
    made: Any = renamed(operation, f"{operation.id}/again")
    if not isinstance(made, SetScalar) and rng.random() < 0.5:
        made = replace(made, after=(operation.id,))
    return Mutant.of(
        f"{operation.id} twice", with_program(schedule, added(program, made, after=operation.id))
    )


def _stream(program: Program, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the stream of an operation, and the edge to it."""
    operation: Any = program.by_id[name]
    stream = getattr(operation, "stream", None)
    if stream is None or isinstance(operation, HostWait):
        raise ValueError(f"{name} is on no stream")
    return str(stream), (name,)


def insert_write(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Write a number, or copy something, where a buffer is in use."""
    program = one_of(rng, schedule.programs)
    near, view = one_of(rng, alive(program))
    stream, after = _stream(program, near)
    target = view if rng.random() < 0.5 or view.size < 2 else part_of(view, rng)
    made: Fill | Copy
    if rng.random() < 0.5:
        value = one_of(rng, VALUES)
        made = Fill(id="edit/fill", stream=stream, after=after, target=target, value=value)
    else:
        views = {other for _, other in alive(program) if other.size == target.size}
        source = one_of(rng, sorted(views, key=str))
        adds, divisor = bool(rng.integers(2)), int(rng.integers(1, 3))
        made = Copy(
            id="edit/copy",
            stream=stream,
            after=after,
            source=source,
            target=target,
            accumulate=adds,
            divisor=divisor,
        )
    beside = {"after" if rng.random() < 0.7 else "before": near}
    return Mutant.of(f"{made} {beside}", with_program(schedule, added(program, made, **beside)))


def part_of(view: View, rng: np.random.Generator) -> View:
    """Return a part of a view."""
    size = int(rng.integers(1, view.size))
    if view.axis is not None:
        return replace(view, size=size)
    return replace(view, start=view.start + int(rng.integers(0, view.size - size + 1)), size=size)


def drop(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Leave an operation out."""
    program = one_of(rng, schedule.programs)
    name = one_of(rng, of_step(program)).id
    return Mutant.of(f"no {name}", with_program(schedule, dropped(program, name)))


def move(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Move an operation, without its edges to later ones."""
    program = one_of(rng, schedule.programs)
    operations = of_step(program)
    index = int(rng.integers(len(operations)))
    far = len(operations) if rng.random() < 0.5 else 4
    other = int(np.clip(index + rng.integers(-far, far + 1), 0, len(operations) - 1))
    name, at = operations[index].id, operations[other].id
    if name == at:
        raise ValueError("moved to where it is")
    return Mutant.of(
        f"{name} before {at}", with_program(schedule, shifted(program, name, before=at))
    )


def swap_operands(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Let an update, a copy or a measure act on the operands of a similar one."""
    program = one_of(rng, schedule.programs)
    one = one_of(rng, (each for each in of_step(program) if isinstance(each, Compute | Copy)))
    other = one_of(rng, _sisters(program, one))
    if isinstance(one, Compute) and isinstance(other, Compute):
        number = int(rng.integers(len(one.operands)))
        same = [each for each in other.operands if each.role is one.operands[number].role]
        operands = (*one.operands[:number], one_of(rng, same), *one.operands[number + 1 :])
        made: Operation = replace(one, operands=operands)
    else:
        assert isinstance(one, Copy)
        assert isinstance(other, Copy)
        made = (
            replace(one, source=other.source)
            if rng.random() < 0.5
            else replace(one, target=other.target)
        )
    text = f"{one.id} with something of {other.id}"
    return Mutant.of(text, with_program(schedule, replaced(program, made.id, made)))


def _sisters(program: Program, one: Operation) -> Iterable[Operation]:
    for each in of_step(program):
        if type(each) is type(one) and each.id != one.id:
            if isinstance(each, Compute) and isinstance(one, Compute):
                if each.action is one.action and each.action is not Action.LOAD:
                    yield each
            else:
                yield each
