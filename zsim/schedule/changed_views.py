"""Copies of operations with other views, which share operands where the originals do."""

from collections.abc import Callable
from typing import assert_never

from msgspec.structs import replace

from zsim.schedule.operation import (
    Allocate,
    Branch,
    CollectiveOperation,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operand,
    Operation,
    ReadCounts,
    Receive,
    Send,
    SetScalar,
    Together,
    View,
)

Operands = dict[tuple[object, ...], tuple[Operand, ...]]
"""Changed operands, by the identity of the original ones and the buffers of the changed ones."""


def with_views(
    operation: Operation, change: Callable[[View], View], operands: Operands
) -> Operation:
    """Return `operation` with `change` applied to its views; itself if none changes."""
    match operation:
        case Compute():
            return _compute(operation, change, operands)
        case Copy() | CollectiveOperation():
            source, target = change(operation.source), change(operation.target)
            if source is operation.source and target is operation.target:
                return operation
            return replace(operation, source=source, target=target)
        case Send(source=view) | ReadCounts(source=view):
            made = change(view)
            return operation if made is view else replace(operation, source=made)
        case Fill(target=view) | Receive(target=view):
            made = change(view)
            return operation if made is view else replace(operation, target=made)
        case Together(members=members):
            changed = tuple(with_views(each, change, operands) for each in members)
            return replace(operation, members=changed)
        case Branch(then=then, otherwise=otherwise):
            sides = (
                tuple(with_views(each, change, operands) for each in side)
                for side in (then, otherwise)
            )
            return replace(operation, **dict(zip(("then", "otherwise"), sides, strict=True)))
        case Allocate() | Free() | HostWait() | SetScalar():
            return operation
        case Communication():
            raise TypeError(f"{operation.id}: views of {operation.name} are not known")
        case _:
            assert_never(operation)


def _compute(compute: Compute, change: Callable[[View], View], operands: Operands) -> Compute:
    views = [change(each.view) for each in compute.operands]
    pairs = list(zip(compute.operands, views, strict=True))
    if all(each.view is view for each, view in pairs):
        return compute
    key = (id(compute.operands), *(view.buffer for view in views))
    if key not in operands:
        operands[key] = tuple(replace(each, view=view) for each, view in pairs)
    return replace(compute, operands=operands[key])
