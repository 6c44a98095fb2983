"""Ring-equivalent bytes: what a rank sends for a collective if the ring algorithm is used.

The unit in which volumes are promised, proved and compared, whatever algorithm a backend runs.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", section 4; Rajbhandari et al. 2020 (ZeRO), section 7.1, counts in the same unit.
"""

from typing import assert_never

from zsim.schedule.operation import (
    AllGather,
    Allocate,
    AllReduce,
    Branch,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Receive,
    ReduceScatter,
    Send,
    SetScalar,
    Together,
)

COLLECTIVE = {
    AllGather: "all_gather",
    ReduceScatter: "reduce_scatter",
    AllReduce: "all_reduce",
    Broadcast: "broadcast",
    Send: "send",
    Receive: "receive",
}
"""Name of each collective in reports and contracts."""


def ring_equivalent_bytes(operation: Communication, count: int) -> int:
    """Bytes that one rank of a group of `count` sends for `operation`; 0 in a group of one.

    All-gather and reduce-scatter send every shard but one; an all-reduce is one of each, on chunks
    of ceil(n / count) elements. In a broadcast each rank passes on all such chunks but one. A send
    counts its elements, a receive nothing.
    """
    if count == 1:
        return 0
    width = operation.wire.size_bytes
    match operation:
        case AllGather(source=shard) | ReduceScatter(target=shard):
            return (count - 1) * shard.size * width
        case AllReduce(source=source):
            return 2 * (count - 1) * -(-source.size // count) * width
        case Broadcast(source=source):
            return (count - 1) * -(-source.size // count) * width
        case Send(source=source):
            return source.size * width
        case Receive():
            return 0
        case _:
            assert_never(operation)


def element_count(operation: Communication) -> int:
    """Elements that one rank hands to the communicator (receive: takes from it)."""
    match operation:
        case (
            AllGather(source=view)
            | ReduceScatter(source=view)
            | AllReduce(source=view)
            | Broadcast(source=view)
            | Send(source=view)
            | Receive(target=view)
        ):
            return view.size
        case _:
            assert_never(operation)


def is_scalar(operation: Communication) -> bool:
    """Whether the whole tensor is one element (norm, overflow, loss): such bytes are listed apart.

    An all-gather of one element per rank is not: together they are a tensor.
    """
    match operation:
        case AllGather(target=whole) | ReduceScatter(source=whole) | AllReduce(source=whole):
            return whole.size == 1
        case Broadcast(source=whole) | Send(source=whole) | Receive(target=whole):
            return whole.size == 1
        case _:
            assert_never(operation)


def communications(operation: Operation) -> tuple[Communication, ...]:
    """What `operation` hands to its communicator: itself, the members of a Together, nothing."""
    match operation:
        case Together(members=members):
            return members
        case AllGather() | ReduceScatter() | AllReduce() | Broadcast() | Send() | Receive():
            return (operation,)
        case (
            Allocate() | Free() | Compute() | Fill() | Copy() | HostWait() | SetScalar() | Branch()
        ):
            return ()
        case _:
            assert_never(operation)
