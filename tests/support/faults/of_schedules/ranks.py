"""One rank that differs from the others, and perhaps makes up for it later."""

import numpy as np

from faults.changes import Edit
from faults.fault import Draw, Mutant, one_of
from faults.of_schedules.fields import with_field
from faults.of_schedules.gradients import divides_after
from faults.of_schedules.insertions import drop, insert_copy, insert_write, move, of_step, repeat
from faults.of_schedules.shapes import coverage, operands
from faults.schedules import ProgramChange, added, apart, places, with_program
from zsim.schedule.access import accesses
from zsim.schedule.operation import AllReduce, Copy, Operation, ReduceScatter, Reduction, View
from zsim.schedule.schedule import Program, Schedule


def _anything(schedule: Schedule, rng: np.random.Generator) -> Edit:
    program = one_of(rng, schedule.programs)
    return with_field(schedule, program, one_of(rng, of_step(program)), rng)


ALONE: tuple[Draw[Schedule, Schedule], ...] = (
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
    """Change ranks at one place along an axis."""
    axis, place = one_of(rng, places(schedule))
    edit = one_of(rng, ALONE)(schedule, rng)
    others = {program.role: program for program in edit.made.programs}
    made = apart(schedule, axis, place, lambda program: others[program.role])
    return Mutant.of(f"at {axis} {place} alone: {edit.text}", made)


def halved(name: str, stream: str, view: View) -> Operation:
    """Return an operation that halves a view in place."""
    return Copy(id=name, stream=stream, source=view, target=view, divisor=2)


def doubled(name: str, stream: str, view: View) -> Operation:
    """Return an operation that adds a view to itself."""
    return Copy(id=name, stream=stream, source=view, target=view, accumulate=True)


def made_up(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Halve a view here and double another one there: on one rank, or on all.

    Operations between the two may be linear in it or not.
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
    return _somewhere(schedule, rng, program, change, text, alone=0.5)


def _somewhere(
    schedule: Schedule,
    rng: np.random.Generator,
    program: Program,
    change: ProgramChange,
    text: str,
    *,
    alone: float,
) -> Edit:
    """Change a program, or every one at one place of an axis, with a chance of `alone`."""
    if rng.random() < alone:
        axis, place = one_of(rng, places(schedule))
        return Mutant.of(f"at {axis} {place} alone: {text}", apart(schedule, axis, place, change))
    return Mutant.of(text, with_program(schedule, change(program)))


def late_division(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Divide after a reduction instead of before it: on one rank, or on all."""
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
    text = f"divided by {divisor} after {reduction.id}, not in {', '.join(sorted(chosen))}"
    change = divides_after(reduction, chosen, divisor)
    return _somewhere(schedule, rng, program, change, text, alone=0.7)
