"""Changes that are drawn: anything that a file could say otherwise.

They know the structure of a schedule (dataclasses, tuples, names that occur), and nothing of what
makes one right.
"""

import numpy as np

from faults.changes import Edit
from faults.fault import Draw, Mutant, one_of
from faults.of_schedules.fields import any_field
from faults.of_schedules.insertions import (
    drop,
    insert_copy,
    insert_write,
    move,
    repeat,
    swap_operands,
)
from faults.of_schedules.ranks import late_division, made_up, one_rank
from faults.of_schedules.shapes import buffers, coverage, formats, layouts, operands
from faults.of_schedules.state import (
    fill_live,
    reads_scalars,
    rule_kinds,
    rules,
    scalars,
    set_up,
)
from zsim.schedule.schedule import Schedule

SINGLE: dict[str, Draw[Schedule, Schedule]] = {
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
    """Draw two changes, one after the other."""
    first = one_of(rng, SINGLE.values())(schedule, rng)
    second = one_of(rng, SINGLE.values())(first.made, rng)
    return Mutant.of(f"{first.text}; {second.text}", second.made)


DRAWN: dict[str, Draw[Schedule, Schedule]] = {**SINGLE, "two edits": pair}
"""Operators by name; each raises a ValueError where it can change nothing."""
