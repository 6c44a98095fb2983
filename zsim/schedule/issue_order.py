"""Issue order of a host: setup once, then the step repeatedly, with branches resolved.

A branch is followed by the list that it takes. The schedule does not determine a branch on a
value: the caller names the steps that overflow, and every other step takes `otherwise` (value
zero). A branch on a scalar follows the host's count. Callers that pass no scalars start with
zeros, the final values of schedules that count their first steps down.
"""

from collections.abc import Iterable, Iterator

from zsim.schedule.operation import Branch, Operation, SetScalar
from zsim.schedule.schedule import Program

SETUP = -1
"""The step number that traces give to setup."""

NO_OVERFLOW: frozenset[int] = frozenset()


def taken(
    operations: Iterable[Operation], *, overflows: bool, scalars: dict[str, float] | None = None
) -> Iterator[Operation]:
    """Yield operations in issue order; every branch is followed by the list that it takes.

    `scalars` are the host's scalars, updated on the go.
    """
    counted = {} if scalars is None else scalars
    for operation in operations:
        yield operation
        if type(operation) is SetScalar:
            set_scalar(operation, counted)
        elif type(operation) is Branch:
            known = overflows if operation.scalar is None else counted.get(operation.scalar, 0.0)
            side = operation.then if known else operation.otherwise
            yield from taken(side, overflows=overflows, scalars=counted)


def set_scalar(change: SetScalar, scalars: dict[str, float]) -> None:
    """Apply `change` to the host's scalars; an unknown scalar is zero."""
    if change.counter is not None and scalars.get(change.counter, 0.0) % change.every != 0:
        return
    value = scalars.get(change.scalar, 0.0) * change.multiply + change.add
    scalars[change.scalar] = min(max(value, change.minimum), change.maximum)


def issued(
    program: Program,
    steps: int,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
    scalars: dict[str, float] | None = None,
) -> Iterator[tuple[int, Operation]]:
    """Yield (step, operation) of setup and of `steps` steps, in issue order."""
    for step, operations in issued_lists(program, steps, overflow_steps, scalars):
        for operation in operations:
            yield step, operation


def issued_lists(
    program: Program,
    steps: int,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
    scalars: dict[str, float] | None = None,
) -> Iterator[tuple[int, Iterable[Operation]]]:
    """Yield (step, operations) for setup, then each step. Consume each list before the next."""
    if scalars is None and not program.branches:
        yield SETUP, program.setup
        for step in range(steps):
            yield step, program.step
        return
    counted = {} if scalars is None else scalars
    yield SETUP, taken(program.setup, overflows=False, scalars=counted)
    for step in range(steps):
        overflows = step in overflow_steps
        yield step, taken(program.step, overflows=overflows, scalars=counted)
