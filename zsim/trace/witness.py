"""Witnesses: the actions on a rank, observed below the backend, at torch's dispatcher.

A backend reports its own events, memory ledger and transfers, under the names of the schedule. A
witness has no names of buffers or views. It records storages by number, with pointer and size; the
bytes of them that each call read and wrote; and the tensors passed to torch.distributed, with
checksums before and after. Only marks relate it to a schedule: they record when the host reached
each operation.

All times are ticks of one counter of the rank, which every mark, call and collective advances.
"""

from dataclasses import dataclass

Region = tuple[int, int, int]
"""Bytes of a storage: its number, the first byte, the number of bytes."""

Checksum = tuple[int, float, float]
"""Checksum of a tensor: sum of its bit patterns' cubes modulo 2^64, of values, of magnitudes.

All three are additive over pieces. The first one is exact: equal data have equal sums, in any
order. The other two are in fp64, to check the result of a reduction.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The host reached `operation` of `step`; without a name, the end of the step."""

    step: int
    operation: str
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Memory that was allocated: `made` is None before the first mark, `released` after the last.

    With `by_thread`, a thread of torch.distributed held the last reference, and `released` is when
    that thread dropped it; the rank's own thread had done so before.
    """

    pointer: int
    bytes: int
    made: int | None = None
    released: int | None = None
    by_thread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator of torch, with the regions that it was given to read and to write.

    Omitted are calls that touch only storages made since the latest mark, except optimizers that
    are one operator. `numbers` are the numbers among its arguments.
    """

    operator: str
    tick: int
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessedCollective:
    """A tensor, or a pair of tensors, passed to torch.distributed.

    Attributes:
        kind: as in `zsim.trace.trace.Transfer`.
        communicator: torch's name of the process group, equal on its members.
        ranks: its members, by number in the world, in its order.
        dtype: format of the elements, as torch names it.
        reduction: "sum", "average", "max", or torch's name of it.
        peer: number in the world of the root, the receiver or the sender.
        source: the input of this rank, `target` its output; the same region if in place.
        brought: checksums before; for a reduce-scatter, one for each member's part of the input.
        left: checksums after; for an all-gather, one for each member's part of the output.
        tick: when it was passed.
        waited: when the rank learned that it was complete; None if it never asked.
    """

    kind: str
    communicator: str
    ranks: tuple[int, ...]
    dtype: str
    reduction: str = ""
    peer: int | None = None
    source: Region | None = None
    target: Region | None = None
    brought: tuple[Checksum, ...] = ()
    left: tuple[Checksum, ...] = ()
    tick: int
    waited: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Everything observed on one rank; a storage's number is its index in `storages`."""

    marks: tuple[Mark, ...]
    storages: tuple[Storage, ...]
    calls: tuple[Call, ...]
    collectives: tuple[WitnessedCollective, ...]

    def __post_init__(self) -> None:
        ticks = [mark.tick for mark in self.marks]
        if ticks != sorted(ticks):
            raise ValueError("marks: their ticks must ascend")
        regions = [each for call in self.calls for each in (*call.reads, *call.writes)]
        ends = (each for one in self.collectives for each in (one.source, one.target))
        for number, start, size in (*regions, *(each for each in ends if each is not None)):
            if not 0 <= number < len(self.storages) or min(start, size) < 0:
                raise ValueError(f"region [{number}, {start}, {size}] is of no storage")
