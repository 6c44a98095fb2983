"""One rank does something else than the others, and perhaps makes up for it later."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edits.fields import edited, pool_of
from edits.insertion import drop, insert_copy, insert_write, move, of_step, repeat
from edits.programs import Edit, added, apart, one_of, places, replaced, rewritten
from edits.shape import coverage, operands
from zsim.schedule.access import accesses
from zsim.schedule.operation import AllReduce, Copy, Operation, ReduceScatter, Reduction, View
from zsim.schedule.schedule import Program, Schedule

Draw = Callable[[Schedule, np.random.Generator], Edit]


def _anything(schedule: Schedule, rng: np.random.Generator) -> Edit:
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, of_step(program))
    text, made = edited(operation, pool_of(schedule), rng)
    found = replaced(program, operation.id, made)
    programs = tuple(found if each is program else each for each in schedule.programs)
    return Edit(f"{operation.id} {text}", replace(schedule, programs=programs))


ALONE: tuple[Draw, ...] = (
    _anything,
    drop,
    insert_copy,
    insert_write,
    move,
    repeat,
    coverage,
    operands,
)


def one_rank(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Ranks at one place along an axis differ from the others by one edit."""
    axis, place = one_of(rng, places(schedule))
    edit = one_of(rng, ALONE)(schedule, rng)
    others = {program.role: program for program in edit.schedule.programs}
    made = apart(schedule, axis, place, lambda program: others[program.role])
    return Edit(f"at {axis} {place} alone: {edit.text}", made)


def halved(name: str, stream: str, view: View) -> Operation:
    """An operation that halves a view in place."""
    return Copy(id=name, stream=stream, source=view, target=view, divisor=2)


def doubled(name: str, stream: str, view: View) -> Operation:
    """An operation that adds a view to itself."""
    return Copy(id=name, stream=stream, source=view, target=view, accumulate=True)


def made_up(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """A view is halved here and another one doubled there: by one rank, or by all.

    Between the two there may be what is linear in it, or something else.
    """
    program = one_of(rng, schedule.programs)
    writes = [
        (number, each, access.view)
        for number, each in enumerate(of_step(program))
        for access in accesses(each)
        if access.writes and hasattr(each, "stream") and access.view.size
    ]
    first, second = sorted(int(each) for each in rng.integers(len(writes), size=2))
    if rng.random() < 0.7:
        second = min(len(writes) - 1, first + int(rng.integers(1, 6)))
    pair = [writes[first], writes[second]]
    makes = [halved, doubled] if rng.random() < 0.5 else [doubled, halved]

    def change(each: Program) -> Program:
        for number, ((_, operation, view), make) in enumerate(zip(pair, makes, strict=True)):
            stream: str = getattr(operation, "stream", "")
            made = make(f"edit/{number}", stream, view)
            each = added(each, made, after=operation.id)
        return each

    text = ", ".join(
        f"{make.__name__} {view.buffer} after {operation.id}"
        for (_, operation, view), make in zip(pair, makes, strict=True)
    )
    if rng.random() < 0.5:
        axis, place = one_of(rng, places(schedule))
        return Edit(f"at {axis} {place} alone: {text}", apart(schedule, axis, place, change))
    programs = tuple(change(each) if each is program else each for each in schedule.programs)
    return Edit(text, replace(schedule, programs=programs))


def late_division(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """A divisor stands after a reduction instead of before it: on one rank, or on all."""
    program = one_of(rng, schedule.programs)
    reductions = [
        each
        for each in of_step(program)
        if isinstance(each, AllReduce | ReduceScatter) and each.reduction is Reduction.SUM
    ]
    reduction = one_of(rng, reductions)
    divisors = [
        each
        for each in of_step(program)
        if isinstance(each, Copy)
        and each.divisor > 1
        and reduction.source.buffer in (each.source.buffer, each.target.buffer)
    ]
    if not divisors:
        divisors = [
            each for each in of_step(program) if isinstance(each, Copy) and each.divisor > 1
        ]
    chosen = {one_of(rng, divisors).id} if rng.random() < 0.3 else {each.id for each in divisors}
    divisor = one_of(rng, divisors).divisor
    after = Copy(
        id="edit/divide",
        stream=reduction.stream,
        source=reduction.target,
        target=reduction.target,
        divisor=divisor,
    )

    def change(each: Program) -> Program:
        whole = rewritten(
            each,
            lambda operation: (
                (replace(operation, divisor=1),)
                if isinstance(operation, Copy) and operation.id in chosen
                else (operation,)
            ),
        )
        return added(whole, after, after=reduction.id)

    text = f"divided by {divisor} after {reduction.id}, not in {', '.join(sorted(chosen))}"
    if rng.random() < 0.7:
        axis, place = one_of(rng, places(schedule))
        return Edit(f"at {axis} {place} alone: {text}", apart(schedule, axis, place, change))
    programs = tuple(change(each) if each is program else each for each in schedule.programs)
    return Edit(text, replace(schedule, programs=programs))
