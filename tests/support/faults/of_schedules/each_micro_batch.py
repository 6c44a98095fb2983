"""Changes that are the same in each micro-batch, and names that are alike in all.

A change of one place makes one micro-batch unlike the others. One that is made in each leaves
nothing unlike but plain training. Operations of different micro-batches belong together if their
ids differ in its number alone.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant
from faults.schedules import with_program
from zsim.schedule.operation import (
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    HostWait,
    Operation,
    StreamOperation,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

MICRO_BATCH = re.compile(r"/mb(\d+)/")
SLOT = re.compile(r"@\d+")
NONE = -1
Change = Callable[[Operation, Program, np.random.Generator], Operation | None]
"""Makes another of an operation, or none. A generator draws the same for each of them."""


def number_of(operation: Operation) -> int:
    """Return the micro-batch that an id names; NONE if it names none."""
    found = MICRO_BATCH.search(operation.id)
    return NONE if found is None else int(found.group(1))


def pattern_of(operation: Operation) -> str:
    """Return the part of an operation's id that is alike in all micro-batches."""
    return SLOT.sub("", MICRO_BATCH.sub("/mb/", operation.id))


def renamed(operation: Operation, of: Callable[[str], str]) -> Operation:
    """Return an operation with other ids, in its edges too."""

    def edge(each: Edge) -> Edge:
        return of(each) if isinstance(each, str) else each

    found = replace(operation, id=of(operation.id))
    if isinstance(found, Free):
        return replace(found, uses=tuple(map(of, found.uses)))
    if isinstance(found, HostWait):
        return replace(found, operation=edge(found.operation))
    if isinstance(found, StreamOperation):
        return replace(found, after=tuple(map(edge, found.after)))
    return found


def dropped(operation: Operation, program: Program, rng: np.random.Generator) -> Operation | None:
    """Leave the operation out."""
    del operation, program, rng
    return None


def copied_otherwise(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """Copy instead of adding, add instead of copying, or divide by another number."""
    del program
    if not isinstance(operation, Copy):
        return operation
    if rng.integers(2):
        return replace(operation, accumulate=not operation.accumulate)
    return replace(operation, divisor=operation.divisor + int(rng.integers(1, 3)))


def filled_otherwise(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """Fill with another number."""
    del program
    if not isinstance(operation, Fill):
        return operation
    return replace(operation, value=operation.value + float(rng.integers(1, 3)))


def of_another_micro_batch(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """Compute the segment of the micro-batch before, or another segment or unit."""
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
    """Exchange two operands of a segment, or put one on another buffer of the same size."""
    if not isinstance(operation, Compute) or len(operation.operands) < 2:
        return operation
    operands = list(operation.operands)
    one, other = rng.choice(len(operands), 2, replace=False)
    if rng.integers(2):
        views = operands[one].view, operands[other].view
        operands[one] = replace(operands[one], view=views[1])
        operands[other] = replace(operands[other], view=views[0])
    else:
        view = _elsewhere(operands[one].view, program, int(rng.integers(1 << 30)))
        operands[one] = replace(operands[one], view=view)
    return replace(operation, operands=tuple(operands))


def moved_elsewhere(
    operation: Operation, program: Program, rng: np.random.Generator
) -> Operation | None:
    """Copy to another buffer of the same size, or from one."""
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


def changed_in_each(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Change one operation in each micro-batch, or in each from some one on.

    Raises:
        ValueError: nothing can be changed so, or the result is no schedule.
    """
    program = schedule.programs[int(rng.integers(len(schedule.programs)))]
    change = CHANGES[int(rng.integers(len(CHANGES)))]
    numbered = [each for each in program.step if MICRO_BATCH.search(each.id)]
    chosen = numbered[int(rng.integers(len(numbered)))]
    seed, skipped = int(rng.integers(1 << 30)), int(rng.integers(3))
    step: list[Operation] = []
    found = 0
    for each in program.step:
        made: Operation | None = each
        if pattern_of(each) == pattern_of(chosen):
            found += 1
            if found > skipped:
                made = change(each, program, np.random.default_rng(seed))
        if made is not None:
            step.append(made)
    if step == list(program.step):
        raise ValueError("nothing is changed")
    text = f"{change.__name__} {pattern_of(chosen)} {seed}, not in the first {skipped}"
    return Mutant.of(text, with_program(schedule, replace(program, step=tuple(step))))
