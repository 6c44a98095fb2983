"""Ring-equivalent bytes: the bytes that a rank sends for a collective with the ring algorithm.

This is the unit in which volumes are promised, proved and compared, whatever algorithm a backend
runs. Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 4; Rajbhandari et al. 2020 (ZeRO), section 7.1, counts in the same unit.
"""

from zsim.schedule.operation import AllToAll, Communication, Operation, PointToPoint, Together
from zsim.trace.trace import Transfer


def ring_equivalent_bytes(operation: Communication, count: int) -> int:
    """Return the bytes that one rank of a group of `count` sends; 0 in a group of one.

    The whole tensor is `count` chunks of equal size, rounded up; in every lap all but one of them
    are sent. A send counts its elements, a receive nothing. Unequal blocks count as they are.
    """
    if count == 1:
        return 0
    width = operation.wire.size_bytes
    if isinstance(operation, PointToPoint):
        return 0 if operation.reads is None else operation.reads.size * width
    if isinstance(operation, AllToAll) and operation.sent:
        return (sum(operation.sent) - (operation.kept or 0)) * width
    return operation.laps * (count - 1) * -(-operation.whole.size // count) * width


def element_count(operation: Communication) -> int:
    """Return the elements that one rank contributes (for a receive, that it gets)."""
    return operation.brought.size


def is_scalar(operation: Communication) -> bool:
    """Return True if the whole tensor is one element (norm, overflow, loss).

    Such bytes are listed separately. An all-gather of one element per rank is not scalar: together
    they are a tensor.
    """
    return operation.whole.size == 1


def transfer(operation: Communication, step: int, sent_bytes: int) -> Transfer:
    """Return the trace record of `operation`, for which a rank sends `sent_bytes`."""
    return Transfer(
        operation=operation.id,
        step=step,
        group=operation.group,
        collective=operation.name,
        elements=element_count(operation),
        bytes=sent_bytes,
        scalar=is_scalar(operation),
    )


def communications(operation: Operation) -> tuple[Communication, ...]:
    """Return the communications in `operation`: itself, the members of a Together, or none."""
    if isinstance(operation, Together):
        return operation.members
    return (operation,) if isinstance(operation, Communication) else ()
