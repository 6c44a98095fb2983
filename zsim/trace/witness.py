"""Witnesses: what was really done on a rank, seen below the backend, at torch's dispatcher.

A backend's events, book and transfers are what it says of itself, under the names of the schedule.
A witness knows no name of a buffer or view: storages by number, with pointer and size; which bytes
of them each call read and wrote; what torch.distributed was handed, with checksums before and
after. Only marks relate it to a schedule: they say when the host came to which operation.

All moments are ticks of one counter of the rank, which every mark, call and collective advances.
"""

from dataclasses import dataclass

Region = tuple[int, int, int]
"""Bytes of a storage: its number, the first byte, how many."""

Checksum = tuple[int, float, float]
"""Of a tensor: a sum of its bit patterns' cubes modulo 2^64, the sum of values and of magnitudes.

All three are additive over pieces. The first one is exact: equal data have equal sums, in any
order. The other two are in fp64, for what a reduction has added up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The host came to `operation` of `step`; without a name it came to the end of the step."""

    step: int
    operation: str
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Memory that lived: `made` and `released` are None before the first mark, after the last.

    With `by_thread`, a thread of torch.distributed had the last reference, and `released` says when
    that thread dropped it: the rank's own thread had done so before.
    """

    pointer: int
    bytes: int
    made: int | None = None
    released: int | None = None
    by_thread: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator of torch, with all that it was given to read and to write.

    Left out are those that touch only storages made since the latest mark, but for optimizers that
    are one operator. `numbers` are those among its arguments.
    """

    operator: str
    tick: int
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WitnessedCollective:
    """A tensor, or a pair of tensors, that torch.distributed was handed.

    Attributes:
        kind: as in `zsim.trace.trace.Transfer`.
        communicator: torch's own name of the process group, equal on its members.
        ranks: its members, by number in the world, in its order.
        dtype: format of the elements, as torch names it.
        reduction: "sum", "average", "max", or torch's name of it.
        peer: number in the world of the root, of whom it is sent to, or of whom it comes from.
        source: what this rank brings, `target` what it gets; the same one if in place.
        brought: checksums before; of what a reduce-scatter takes, one for each member's part.
        left: checksums after; of what an all-gather leaves, one for each member's part.
        tick: when it was handed over.
        waited: when the rank knew that it was complete; None if it never asked.
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
    """Everything seen on one rank; a storage's number is its place in `storages`."""

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
