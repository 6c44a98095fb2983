"""Set-up, rules, and numbers that hosts count."""

from dataclasses import fields
from typing import Any

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant, one_of
from faults.of_schedules.fields import edited, others, pool_of, with_field
from faults.of_schedules.updates import other_kind
from faults.schedules import (
    added,
    again,
    dropped,
    everywhere,
    replaced,
    rewritten,
    shifted,
    with_program,
)
from zsim.schedule.operation import Action, Compute, Fill, Operation, SetScalar, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule


def set_up(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Do something else in set-up, in another order, twice, or not."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, walk(program.setup))
    name = operation.id
    match int(rng.integers(5)):
        case 0:
            made, text = dropped(program, name), "dropped"
        case 1:
            other = one_of(rng, walk(program.setup)).id
            made, text = shifted(program, name, before=other), f"before {other}"
        case 2 if isinstance(operation, Fill | Compute):
            other = one_of(rng, walk(program.setup)).id
            made = added(program, again(operation), after=other)
            text = f"again after {other}"
        case 3 if isinstance(operation, Fill):
            value = one_of(rng, (1.0, -1.0, 0.5, 1e-8))
            made, text = replaced(program, name, replace(operation, value=value)), f"{value}"
        case _:
            text, new = edited(operation, pool_of(schedule), rng)
            made = replaced(program, name, new)
    return Mutant.of(f"set-up: {name} {text}", with_program(schedule, made))


def fill_live(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Fill a buffer with a number after set-up initializes or zeroes it."""
    program = one_of(rng, schedule.programs)
    writes = [each for each in walk(program.setup) if isinstance(each, Fill | Compute)]
    operation = one_of(rng, writes)
    views = (
        [operation.target]
        if isinstance(operation, Fill)
        else [each.view for each in operation.operands]
    )
    value = one_of(rng, (0.0, 1.0, 2.0))
    made = Fill(
        id="setup/edit/fill", stream=operation.stream, target=one_of(rng, views), value=value
    )
    return Mutant.of(
        f"set-up: {made.target.buffer} is {value} after {operation.id}",
        with_program(schedule, added(program, made, after=operation.id)),
    )


def with_rules(program: Program, names: set[str], change: Any) -> Program:  # noqa: ANN401 (a rule in, a rule out)
    """Return the program with another rule in the operations `names`."""
    return rewritten(
        program,
        lambda each: (
            (replace(each, rule=change(each.rule)),)
            if isinstance(each, Compute) and each.id in names
            else (each,)
        ),
    )


def rules(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Change a constant of a rule, in one operation or in all of its kind."""
    program = one_of(rng, schedule.programs)
    ruled = [each for each in walk(program.step) if isinstance(each, Compute) and each.rule]
    operation = one_of(rng, ruled)
    rule: Any = operation.rule
    field = one_of(rng, fields(rule)).name
    value: float | str = getattr(rule, field)
    choices: tuple[float | str, ...] = (0.0, 1.0, *(each.name for each in schedule.scalars))
    if isinstance(value, bool):
        choices = (not value,)
    elif not isinstance(value, str):
        choices = (value * 1000, value * 2, value / 2, value + 0.125, -value, 0.0, 1.0)
    new = one_of(rng, choices)
    if new == value:
        raise ValueError("the same")
    alike = [each for each in ruled if each.action is operation.action]
    chosen = {each.id for each in (alike if rng.random() < 0.5 else [operation])}
    made = everywhere(
        schedule,
        lambda each: with_rules(each, chosen, lambda old: replace(old, **{field: new})),
    )
    return Mutant.of(f"{field} {value} -> {new} in {', '.join(sorted(chosen))}", made)


def rule_kinds(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Update by another kind of rule, once or always."""
    updates = [
        each
        for program in schedule.programs
        for each in walk(program.step)
        if isinstance(each, Compute) and each.action is Action.UPDATE
    ]
    chosen = {one_of(rng, updates).id} if rng.random() < 0.5 else {each.id for each in updates}

    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Compute) and each.id in chosen:
            return (other_kind(each),)
        return (each,)

    made = everywhere(schedule, lambda program: rewritten(program, change))
    return Mutant.of(f"SGD in {', '.join(sorted(chosen))}", made)


def scalars(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Begin or change a number of the host otherwise."""
    match int(rng.integers(3)):
        case 0:
            scalar = one_of(rng, schedule.scalars)
            initial: Any = one_of(rng, others(scalar.initial, [], rng))
            new = replace(scalar, initial=initial)
            found = tuple(new if each is scalar else each for each in schedule.scalars)
            return Mutant.of(f"{new}", replace(schedule, scalars=found))
        case 1:
            program = one_of(rng, schedule.programs)
            return with_field(schedule, program, one_of(rng, _sets(program)), rng)
        case _:
            return _set_elsewhere(schedule, rng)


def _sets(program: Program) -> list[SetScalar]:
    return [each for each in walk(program.step) if isinstance(each, SetScalar)]


def _set_elsewhere(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Set a number of the host twice, not at all, or elsewhere."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, _sets(program))
    name = operation.id
    at = one_of(rng, walk(program.step)).id
    if rng.random() < 0.3:
        return Mutant.of(f"no {name}", with_program(schedule, dropped(program, name)))
    if rng.random() < 0.5:
        return Mutant.of(
            f"{name} before {at}", with_program(schedule, shifted(program, name, before=at))
        )
    made = again(operation)
    return Mutant.of(
        f"{name} again before {at}", with_program(schedule, added(program, made, before=at))
    )


def reads_scalars(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Give a kernel other numbers of the host, or none."""
    program = one_of(rng, schedule.programs)
    reading = [
        each
        for each in walk(program.step)
        if (isinstance(each, Compute) and (each.scalars or each.rule))
        or (isinstance(each, Fill) and each.scalar)
    ]
    operation = one_of(rng, reading)
    names = [each.name for each in schedule.scalars]
    made: Operation
    if isinstance(operation, Fill):
        made = replace(operation, scalar=one_of(rng, [None, *names]))
    else:
        assert isinstance(operation, Compute)
        choices = [(), *((name,) for name in names), *((name, name) for name in names)]
        made = replace(operation, scalars=one_of(rng, choices))
    if made == operation:
        raise ValueError("the same")
    return Mutant.of(
        f"{operation.id} reads {getattr(made, 'scalars', getattr(made, 'scalar', None))}",
        with_program(schedule, replaced(program, operation.id, made)),
    )
