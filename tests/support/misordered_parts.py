"""Operations whose collectives in parts are ordered wrongly, and schedules that have them."""

from collections.abc import Callable

from faults.schedules import everywhere, rewritten

from zsim.schedule.operation import AllGather, Compute, Operation, ReduceScatter
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule


def rewritten_everywhere(
    made: Schedule, change: Callable[[Operation], Operation | None]
) -> Schedule:
    def each(operation: Operation) -> tuple[Operation, ...]:
        found = change(operation)
        return () if found is None else (found,)

    return everywhere(made, lambda program: rewritten(program, each))


def read_too_early(operation: Operation) -> Operation:
    if isinstance(operation, Compute):
        after = tuple(edge for edge in operation.after if "/gather/" not in str(edge))
        return replace(operation, after=after)
    return operation


def gathered_before_it_is_there(operation: Operation) -> Operation:
    if isinstance(operation, AllGather) and operation.in_parts:
        return replace(operation, after=())
    return operation


def scattered_before_it_is_made(operation: Operation) -> Operation:
    if isinstance(operation, ReduceScatter) and operation.in_parts:
        return replace(operation, after=())
    return operation


def never_shared(operation: Operation) -> Operation | None:
    return None if operation.id.endswith("/share") else gathered_before_it_is_there(operation)
