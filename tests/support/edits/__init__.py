"""Edits of schedules: anything that a file could say otherwise.

Operators know the structure of a schedule (dataclasses, tuples, names that occur), and nothing of
what makes one right: that is decided by running it (`edits.court`).
"""

from collections.abc import Iterator

import numpy as np

from edits.fields import edited, pool_of
from edits.insertion import drop, insert_copy, insert_write, move, repeat, swap_operands
from edits.programs import Edit, one_of, replaced, with_program
from edits.roles import Draw, late_division, made_up, one_rank
from edits.shape import buffers, coverage, formats, layouts, operands
from edits.state import fill_live, reads_scalars, rule_kinds, rules, scalars, set_up
from zsim.schedule.operation import walk
from zsim.schedule.schedule import Schedule

__all__ = ["OPERATORS", "Draw", "Edit", "drawn", "edits"]

TRIES = 40
"""Draws until one is a schedule; most are no schedule where nothing can be changed at all."""


def any_field(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Any field of any operation is another one."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, (*walk(program.setup), *walk(program.step)))
    text, made = edited(operation, pool_of(schedule), rng)
    return Edit(
        f"{operation.id} {text}", with_program(schedule, replaced(program, operation.id, made))
    )


SINGLE: dict[str, Draw] = {
    "insert a copy of an operation": insert_copy,
    "insert a write": insert_write,
    "repeat": repeat,
    "drop": drop,
    "move": move,
    "operands of another": swap_operands,
    "set-up": set_up,
    "fill after set-up": fill_live,
    "constants of rules": rules,
    "kinds of rules": rule_kinds,
    "scalars": scalars,
    "scalars that are read": reads_scalars,
    "layouts": layouts,
    "fields of buffers": buffers,
    "coverage": coverage,
    "operands of what ends a step": operands,
    "one rank alone": one_rank,
    "made up for": made_up,
    "division after a reduction": late_division,
    "any field": any_field,
    "formats": formats,
}


def pair(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Two edits, one after the other."""
    first = one_of(rng, SINGLE.values())(schedule, rng)
    second = one_of(rng, SINGLE.values())(first.schedule, rng)
    return Edit(f"{first.text}; {second.text}", second.schedule)


OPERATORS: dict[str, Draw] = {**SINGLE, "two edits": pair}
"""Operators by name; each draws an edit, or raises a `ValueError` where there is none."""


def drawn(operator: Draw, schedule: Schedule, rng: np.random.Generator) -> Edit | None:
    """An edit that can be made of `schedule`; None if none was found in a few draws."""
    for _ in range(TRIES):
        try:
            found = operator(schedule, rng)
        except ValueError:
            continue
        if found.schedule != schedule:
            return found
    return None


def edits(
    operator: Draw, schedule: Schedule, rng: np.random.Generator, count: int
) -> Iterator[Edit]:
    """Up to `count` edits that differ."""
    seen: set[str] = set()
    for _ in range(2 * count):
        found = drawn(operator, schedule, rng)
        if found is None or len(seen) == count:
            return
        if found.text not in seen:
            seen.add(found.text)
            yield found
