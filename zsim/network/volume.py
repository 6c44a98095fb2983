"""Ring-equivalent bytes: what a rank sends for a collective if the ring algorithm is used.

The unit in which volumes are promised, proved and compared, whatever algorithm a backend runs.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 4; Rajbhandari et al. 2020 (ZeRO), section 7.1, counts in the same unit.
"""

from zsim.schedule.operation import Communication, Operation, PointToPoint, Together
from zsim.trace.trace import Transfer


def ring_equivalent_bytes(operation: Communication, count: int) -> int:
    """Return the bytes that one rank of a group of `count` sends; 0 in a group of one.

    The whole is `count` chunks of equal size, rounded up; all but one of them are sent in every
    lap. A send counts its elements, a receive nothing.
    """
    if count == 1:
        return 0
    width = operation.wire.size_bytes
    if isinstance(operation, PointToPoint):
        return 0 if operation.reads is None else operation.reads.size * width
    return operation.laps * (count - 1) * -(-operation.whole.size // count) * width


def element_count(operation: Communication) -> int:
    """Return the elements that one rank hands to the communicator (receive: takes from it)."""
    return operation.brought.size


def is_scalar(operation: Communication) -> bool:
    """Return whether the whole tensor is one element (norm, overflow, loss).

    Such bytes are listed apart. An all-gather of one element per rank is none: together they are a
    tensor.
    """
    return operation.whole.size == 1


def transfer(operation: Communication, step: int, sent_bytes: int) -> Transfer:
    """Return the line of a trace for `operation`, of which a rank sends so many bytes."""
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
    """Return what `operation` hands to its communicator: itself, members of a Together, nothing."""
    if isinstance(operation, Together):
        return operation.members
    return (operation,) if isinstance(operation, Communication) else ()
