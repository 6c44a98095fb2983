"""Edits of what comes again with each micro-batch: the same in all of them, or in all but some.

An edit of one place makes one micro-batch unlike the others. Made alike in each, nothing is unlike
but plain training.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from edits import OPERATORS, drawn
from edits.programs import with_program

from zsim.schedule.operation import Compute, Copy, Fill, Operation, View
from zsim.schedule.schedule import Program, Schedule, ScheduleError

MICRO_BATCH = re.compile(r"/mb\d+/")
SLOT = re.compile(r"@\d+")
Change = Callable[[Operation, Program, np.random.Generator], Operation | None]
"""Makes another of an operation, or none. A generator draws the same for each of them."""
Draw = Callable[[Schedule, int], Iterator[tuple[str, Schedule]]]
"""Draws edits of a schedule, with a seed."""


def dropped(operation: Operation, program: Program, rng: np.random.Generator) -> Operation | None:
    """No operation."""
    del operation, program, rng
    return None


def copied_otherwise(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """A copy that adds or does not, or divides by another number."""
    del program
    if not isinstance(operation, Copy):
        return operation
    if rng.integers(2):
        return replace(operation, accumulate=not operation.accumulate)
    return replace(operation, divisor=operation.divisor + int(rng.integers(1, 3)))


def filled_otherwise(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """A fill with another number."""
    del program
    if not isinstance(operation, Fill):
        return operation
    return replace(operation, value=operation.value + float(rng.integers(1, 3)))


def of_another_micro_batch(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """A segment of the micro-batch before, or of another segment or unit."""
    if not isinstance(operation, Compute):
        return operation
    what = rng.integers(3)
    if what == 0:
        return replace(operation, micro_batch=max(0, operation.micro_batch - 1))
    if what == 1:
        return replace(operation, segment=operation.segment + 1)
    units = sorted({each.unit for each in program.patterns if isinstance(each, Compute)})
    return replace(operation, unit=units[int(rng.integers(len(units)))])


def with_other_operands(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """A segment with two operands exchanged, or on another buffer of the same size."""
    if not isinstance(operation, Compute) or len(operation.operands) < 2:
        return operation
    operands = list(operation.operands)
    one, other = rng.choice(len(operands), 2, replace=False)
    if rng.integers(2):
        views = operands[one].view, operands[other].view
        operands[one] = replace(operands[one], view=views[1])
        operands[other] = replace(operands[other], view=views[0])
    else:
        operands[one] = replace(
            operands[one], view=_elsewhere(operands[one].view, program, int(rng.integers(1 << 30)))
        )
    return replace(operation, operands=tuple(operands))


def moved_elsewhere(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """A copy to another buffer of the same size, or from one."""
    if not isinstance(operation, Copy):
        return operation
    number = int(rng.integers(1 << 30))
    if rng.integers(2):
        return replace(operation, source=_elsewhere(operation.source, program, number))
    return replace(operation, target=_elsewhere(operation.target, program, number))


def _elsewhere(view: View, program: Program, number: int) -> View:
    """Return the same view of a buffer that is like its own."""
    own = program.by_name[view.buffer]
    alike = [
        each.name
        for each in program.buffers
        if (each.elements, each.dtype, each.pool) == (own.elements, own.dtype, own.pool)
    ]
    return replace(view, buffer=alike[number % len(alike)])


CHANGES: Sequence[Change] = (
    dropped,
    copied_otherwise,
    filled_otherwise,
    of_another_micro_batch,
    with_other_operands,
    moved_elsewhere,
)


def edited(schedule: Schedule, rng: np.random.Generator) -> tuple[str, Schedule]:
    """Draw an edit of one operation in each micro-batch, or in each from some one on.

    Raises:
        ValueError: there is nothing to change so, or what comes of it is no schedule.
    """
    program = schedule.programs[int(rng.integers(len(schedule.programs)))]
    change = CHANGES[int(rng.integers(len(CHANGES)))]
    numbered = [each for each in program.step if MICRO_BATCH.search(each.id)]
    chosen = numbered[int(rng.integers(len(numbered)))]
    seed, skipped = int(rng.integers(1 << 30)), int(rng.integers(3))
    pattern, step, found = _pattern(chosen.id), [], 0
    for each in program.step:
        made: Operation | None = each
        if _pattern(each.id) == pattern:
            found += 1
            if found > skipped:
                made = change(each, program, np.random.default_rng(seed))
        if made is not None:
            step.append(made)
    if step == list(program.step):
        raise ValueError("nothing is changed")
    text = f"{change.__name__} {pattern} {seed}, not in the first {skipped}"
    return text, with_program(schedule, replace(program, step=tuple(step)))


def _pattern(name: str) -> str:
    """Return what ids of an operation have in common in all micro-batches."""
    return SLOT.sub("", MICRO_BATCH.sub("/mb/", name))


def in_each(schedule: Schedule, seed: int) -> Iterator[tuple[str, Schedule]]:
    """Edits that are the same in each micro-batch, from some one on."""
    rng = np.random.default_rng(seed)
    while True:
        try:
            yield edited(schedule, rng)
        except (ValueError, ScheduleError):
            continue


def in_one(schedule: Schedule, seed: int) -> Iterator[tuple[str, Schedule]]:
    """Edits of one place."""
    rng = np.random.default_rng(seed)
    names = sorted(OPERATORS)
    while True:
        found = drawn(OPERATORS[names[int(rng.integers(len(names)))]], schedule, rng)
        if found is not None:
            yield found.text, found.schedule
