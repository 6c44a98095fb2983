"""The issue order of a host: setup once, then the step again and again, branches taken.

A branch is followed by the list that it takes. Which one cannot be known from the schedule: the
steps that overflow are named by the caller, and every other step takes `otherwise` (value zero).
"""

from collections.abc import Iterable, Iterator

from zsim.schedule.operation import Branch, Operation
from zsim.schedule.schedule import Program

SETUP = -1
"""The step number that traces give to setup."""

NO_OVERFLOW: frozenset[int] = frozenset()


def taken(operations: Iterable[Operation], *, overflows: bool) -> Iterator[Operation]:
    """Operations in the order of issue; every branch is followed by the list that it takes."""
    for operation in operations:
        yield operation
        if isinstance(operation, Branch):
            side = operation.then if overflows else operation.otherwise
            yield from taken(side, overflows=overflows)


def issued(
    program: Program, steps: int, overflow_steps: frozenset[int] = NO_OVERFLOW
) -> Iterator[tuple[int, Operation]]:
    """Every operation of setup and of `steps` steps with its step, in the order of issue."""
    for operation in taken(program.setup, overflows=False):
        yield SETUP, operation
    for step in range(steps):
        for operation in taken(program.step, overflows=step in overflow_steps):
            yield step, operation
