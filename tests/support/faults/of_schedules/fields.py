"""Any field of any value, and values that may stand in it instead.

Values are dataclasses, tuples and what these hold. Nothing here knows what a field means: another
value is one that stands in the same field elsewhere, or a number near, a flag turned over.
"""

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import Any, cast

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant, one_of
from faults.field_names import field_names
from faults.schedules import replaced, with_program
from zsim.schedule.operation import Action, Compute, Operation, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

Path = tuple[str | int, ...]
Pool = dict[tuple[str, str], list[object]]
"""Values by class and field."""

SKIPPED = frozenset({"id", "kernels", "then", "otherwise", "launches", "home", "course"})
"""Names, lists that are walked apart, and what changes times or memory alone."""
LABELLED = (Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD)
"""Their micro-batch is a label: what they compute is in what they read."""


def slots(value: object, path: Path = ()) -> Iterator[tuple[Path, tuple[str, str], object]]:
    """Yield every field inside `value`: its path, its class and name, its value."""
    for name in field_names(value):
        label = name == "micro_batch" and isinstance(value, Compute)
        if name in SKIPPED or (label and cast("Compute", value).action in LABELLED):
            continue
        inside: object = getattr(value, name)
        where = (*path, name)
        yield where, (type(value).__name__, name), inside
        yield from slots(inside, where)
    if isinstance(value, tuple):
        for number, each in enumerate(cast("tuple[object, ...]", value)):
            yield from slots(each, (*path, number))


def put(value: object, path: Path, new: object) -> object:
    """Return `value` with `new` at `path`."""
    if not path:
        return new
    first, *rest = path
    if isinstance(first, int):
        items = list(cast("tuple[object, ...]", value))
        items[first] = put(items[first], tuple(rest), new)
        return tuple(items)
    changes = {first: put(getattr(value, first), tuple(rest), new)}
    return replace(cast("Any", value), **changes)


def pool_of(schedule: Schedule) -> Pool:
    """Return the values of each field of the schedule's operations and buffers."""
    found: Pool = defaultdict(list)
    for program in schedule.programs:
        for value in (*walk(program.setup), *walk(program.step), *program.buffers):
            for _, key, inside in slots(value):
                if inside not in found[key]:
                    found[key].append(inside)
    return found


def others(value: object, known: list[object], rng: np.random.Generator) -> list[object]:
    """Return values that may replace `value`, where `known` stand elsewhere."""
    found = [each for each in known if each != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, Enum):
        return [each for each in type(value) if each is not value]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value, 0, 1, *found]
    if isinstance(value, float):
        near = [0.0, 1.0, -value, 2 * value, value / 2, 1000 * value, value + 0.125]
        return [each for each in near if each != value] + found
    if isinstance(value, tuple) and value:
        return found[:5] + _rearranged(cast("tuple[object, ...]", value), rng)
    return found


def _rearranged(items: tuple[object, ...], rng: np.random.Generator) -> list[object]:
    """Return a tuple without one item, with one twice, with two exchanged."""
    one, other = (int(each) for each in rng.integers(len(items), size=2))
    less = (*items[:one], *items[one + 1 :])
    more = (*items[: one + 1], *items[one:])
    swapped = list(items)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return [less, more, tuple(swapped)]


def any_field(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Change any field of any operation."""
    program = one_of(rng, schedule.programs)
    operation = one_of(rng, (*walk(program.setup), *walk(program.step)))
    return with_field(schedule, program, operation, rng)


def with_field(
    schedule: Schedule, program: Program, operation: Operation, rng: np.random.Generator
) -> Edit:
    """Change any field of an operation of a program."""
    text, made = edited(operation, pool_of(schedule), rng)
    changed = with_program(schedule, replaced(program, operation.id, made))
    return Mutant.of(f"{operation.id} {text}", changed)


def edited(
    value: Operation, pool: Pool, rng: np.random.Generator, *, only: frozenset[str] = frozenset()
) -> tuple[str, Operation]:
    """Return `value` with another value in one of its fields, of `only` if there are some.

    Raises:
        ValueError: it has none, or cannot have that.
    """
    choices = [each for each in slots(value) if not only or each[1][1] in only]
    path, key, inside = one_of(rng, choices)
    new = one_of(rng, others(inside, pool.get(key, []), rng))
    where = ".".join(map(str, path))
    return f"{where}: {_short(inside)} -> {_short(new)}", cast("Operation", put(value, path, new))


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
