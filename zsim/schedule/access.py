"""Reads and writes of each operation. Every interpreter and check uses this one table."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple, assert_never

from zsim.schedule.operation import (
    OF_SEGMENTS,
    Action,
    Allocate,
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    ReadCounts,
    Role,
    SetScalar,
    Together,
    View,
)


class Access(NamedTuple):
    """One view that an operation touches. An in-place update both reads and writes it."""

    view: View
    reads: bool
    writes: bool


_access = partial(tuple.__new__, Access)
"""Build an `Access` from a tuple, faster than its constructor: proofs build one per operand."""

READ, WRITE, UPDATE = (True, False), (False, True), (True, True)

COMPUTE_ACCESS: dict[Action, dict[Role, tuple[bool, bool]]] = {
    Action.FORWARD: {
        Role.INPUT: READ,
        Role.PARAMETER: READ,
        Role.OUTPUT: WRITE,
        Role.SAVED: WRITE,
        Role.WORKSPACE: WRITE,
    },
    Action.RECOMPUTE: {
        Role.INPUT: READ,
        Role.PARAMETER: READ,
        Role.OUTPUT: WRITE,
        Role.SAVED: WRITE,
        Role.WORKSPACE: WRITE,
    },
    Action.BACKWARD: {
        Role.INPUT: READ,
        Role.SAVED: READ,
        Role.PARAMETER: READ,
        Role.OUTPUT_GRADIENT: READ,
        Role.INPUT_GRADIENT: WRITE,
        Role.GRADIENT: WRITE,
        Role.WORKSPACE: WRITE,
    },
    Action.BACKWARD_INPUT: {
        Role.INPUT: READ,
        Role.SAVED: READ,
        Role.PARAMETER: READ,
        Role.OUTPUT_GRADIENT: READ,
        Role.INPUT_GRADIENT: WRITE,
        Role.INTERMEDIATE_GRADIENT: WRITE,
        Role.WORKSPACE: WRITE,
    },
    Action.BACKWARD_WEIGHT: {
        Role.INPUT: READ,
        Role.SAVED: READ,
        Role.PARAMETER: READ,
        Role.INTERMEDIATE_GRADIENT: READ,
        Role.GRADIENT: WRITE,
        Role.WORKSPACE: WRITE,
    },
    Action.UPDATE: {
        Role.GRADIENT: READ,
        Role.MOMENT: UPDATE,
        Role.MASTER: UPDATE,
        Role.PARAMETER: UPDATE,
    },
    Action.NORM: {Role.GRADIENT: READ, Role.OUTPUT: WRITE},
    Action.UNSCALE: {Role.GRADIENT: UPDATE},
    Action.CLIP: {Role.INPUT: READ, Role.GRADIENT: UPDATE},
    Action.FINITE: {Role.GRADIENT: READ, Role.OUTPUT: WRITE},
    Action.AMAX: {Role.PARAMETER: READ, Role.INPUT: READ, Role.OUTPUT: WRITE},
    Action.COMPRESS: {Role.GRADIENT: READ, Role.INPUT: READ, Role.OUTPUT: WRITE},
    Action.DECOMPRESS: {Role.INPUT: READ, Role.GRADIENT: WRITE},
    Action.RESIDUAL: {
        Role.GRADIENT: READ,
        Role.INPUT: READ,
        Role.OUTPUT: WRITE,
        Role.WORKSPACE: WRITE,
    },
    Action.INITIALIZE: {Role.PARAMETER: WRITE, Role.MASTER: WRITE},
    Action.LOAD: {Role.OUTPUT: WRITE},
}
"""(reads, writes) of an operand by action and role; an action allows only the roles listed."""
assert set(COMPUTE_ACCESS) == set(Action)


def accesses(operation: Operation) -> list[Access]:
    """Return the accesses of `operation` itself: for a branch its value, not its two lists."""
    match operation:
        case Compute(action=action, operands=operands):
            table = COMPUTE_ACCESS[action]
            return [_access((operand.view, *table[operand.role])) for operand in operands]
        case Communication(reads=source, writes=target):
            found = [] if source is None else [Access(source, reads=True, writes=False)]
            if target is not None:
                found.append(Access(target, reads=False, writes=True))
            return found
        case Fill(target=target):
            return [Access(target, reads=False, writes=True)]
        case Together(members=members):
            return [access for member in members for access in accesses(member)]
        case Copy():
            return [
                Access(operation.source, reads=True, writes=False),
                Access(operation.target, reads=operation.accumulate, writes=True),
            ]
        case Branch(value=value):
            return [] if value is None else [Access(value, reads=True, writes=False)]
        case ReadCounts(source=source):
            return [Access(source, reads=True, writes=False)]
        case Allocate() | Free() | HostWait() | SetScalar():
            return []
        case _:
            assert_never(operation)


def viewed(operation: Operation) -> Iterable[View]:
    """Return the views that `operation` itself touches, in the order of its accesses."""
    if type(operation) is Compute:
        return [operand.view for operand in operation.operands]
    if isinstance(operation, Copy):
        return operation.source, operation.target
    return [access.view for access in accesses(operation)]


def views_of(operation: Operation) -> tuple[int, ...]:
    """Return a key that is equal for operations that touch the same views in the same manner.

    The same segment or copy has one key in all micro-batches. Other operations get an empty key.
    """
    if isinstance(operation, Compute):
        return id(operation.operands), id(operation.action)
    if isinstance(operation, Copy):
        return id(operation.source), id(operation.target), operation.accumulate
    return ()


TOUCHES_NOTHING = frozenset({Allocate, Free, HostWait, SetScalar})
"""Operations without an access."""


def touching(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations that touch buffers, with the members of a `Together` one by one."""
    for operation in operations:
        if type(operation) is Together:
            yield from operation.members
        elif type(operation) not in TOUCHES_NOTHING:
            yield operation


def recurring(operation: Operation) -> tuple[object, ...]:
    """Return a key that a segment or copy shares with its repetitions in other micro-batches.

    Operations with the same key touch the same views. Their ids, streams, edges, random draws and
    costs may differ. Operations other than segments and copies get an empty key.
    """
    if type(operation) is Copy:
        views = id(operation.source), id(operation.target)
        return (*views, operation.accumulate, operation.divisor, operation.by_parameter)
    if type(operation) is Compute and operation.action in OF_SEGMENTS:
        return id(operation.operands), operation.action, operation.unit, operation.segment
    return ()


def distinct(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations of `touching`, but only the first for each `recurring` key."""
    seen: set[tuple[object, ...]] = set()
    for operation in touching(operations):
        key = recurring(operation)
        if key not in seen:
            if key:
                seen.add(key)
            yield operation
