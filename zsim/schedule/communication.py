"""The operations of communicators. What each is like is said here, and asked by whoever reads it.

A new operation is a class with its attributes, named in `_KINDS`; what it does to values is said by
those who compute them: the proof, the simulator's exact values, and the torch backend.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from zsim.dtype import DType
from zsim.schedule.quick_init import quick_init
from zsim.schedule.view import Edge, View

AFTER_OTHERS = {"written_after_others": True}
"""Of a field that stands behind the others in a file."""


class Reduction(StrEnum):
    """Reductions: how they combine what the ranks bring."""

    SUM = "sum"
    AVERAGE = "average"
    MAX = "max"


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """Base of the operations of a communicator: what they share, and what each is like.

    Whatever reads schedules asks these attributes, so that a new operation says here alone what it
    is: which views it reads and writes, how they are cut, how it combines them.

    Class attributes:
        name: in reports and contracts, as NCCL's tests call it.
        laps: how many times all bytes but one rank's part go through each rank's link.
    """

    name: ClassVar[str]
    laps: ClassVar[int] = 0

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    group: str
    wire: DType = field(metadata=AFTER_OTHERS)

    @staticmethod
    def kinds() -> tuple[type["Communication"], ...]:
        """Return all operations of a communicator."""
        return _KINDS

    @property
    def reads(self) -> View | None:
        """The view that a rank brings."""
        return None

    @property
    def writes(self) -> View | None:
        """The view that a rank gets."""
        return None

    @property
    def brought(self) -> View:
        """The view that a rank brings, or where it brings none gets."""
        view = self.reads or self.writes
        assert view is not None
        return view

    @property
    def whole(self) -> View:
        """The view of the whole tensor, of all ranks' parts where it is cut."""
        return self.brought

    @property
    def size(self) -> int:
        """Elements that ranks that meet agree on: of one rank's part, or of the whole."""
        return self.whole.size

    @property
    def agreed(self) -> tuple[object, ...]:
        """Return what ranks that meet agree on beside name, size and wire format."""
        return ()

    @property
    def words(self) -> str:
        """All that ranks that meet agree on, in words."""
        return f"{self.name} of {self.size} {self.wire}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveOperation(Communication):
    """Base of the operations of all ranks of a group, in which each brings and gets something.

    Class attributes:
        splits: the source is a block for each member, and each gets those of its own number.
        joins: the target is a block from each member, in their order.
        moves_in_place: one view may be source and target; where only one of them is cut, the other
            may be the own slot of it.

    One `in_parts` is fused with the `Compute` that reads what it gathers, or makes what it
    scatters: ranks copy parts of each other while kernels of that `Compute` work on others
    (`zsim.schedule.fusions`). What each comes to is the same. One `beside` such a `Compute` is as
    any other on the wire, while kernels of it run that do not touch what this one moves.
    """

    laps: ClassVar[int] = 1
    splits: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    moves_in_place: ClassVar[bool] = True

    source: View
    target: View
    in_parts: bool = field(default=False, metadata=AFTER_OTHERS)
    beside: bool = field(default=False, metadata=AFTER_OTHERS)

    def __post_init__(self) -> None:
        if self.in_parts and self.beside:
            raise ValueError(f"{self.id}: in parts, or whole beside a Compute, not both")

    @property
    def reads(self) -> View | None:
        """The source."""
        return self.source

    @property
    def writes(self) -> View | None:
        """The target."""
        return self.target

    @property
    def agreed(self) -> tuple[object, ...]:
        """Return whether it is in parts: no kernel of NCCL meets copies of others."""
        return (self.in_parts,)

    @property
    def words(self) -> str:
        """All that ranks that meet agree on, in words."""
        return f"{self.name} of {self.size} {self.wire}{' in parts' * self.in_parts}"

    @property
    def whole(self) -> View:
        """The larger of both."""
        return self.target if self.joins else self.source

    @property
    def part(self) -> View | None:
        """The view that is one rank's part of the whole, if one is."""
        if self.splits is self.joins:
            return None
        return self.source if self.joins else self.target

    @property
    def size(self) -> int:
        """Elements of a part, or of the whole if there are no parts."""
        return (self.part or self.whole).size


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducingOperation(CollectiveOperation):
    """Base of the collectives that combine what ranks bring, in the format `accumulate`."""

    reduction: Reduction = Reduction.SUM
    accumulate: DType = field(metadata=AFTER_OTHERS)

    @property
    def agreed(self) -> tuple[object, ...]:
        """Return if it is in parts, the format and the kind of the reduction."""
        return self.in_parts, self.accumulate, self.reduction

    @property
    def words(self) -> str:
        """The same in words, with the reduction."""
        of = f"{self.name} ({self.reduction}) of {self.size} {self.wire} in {self.accumulate}"
        return of + " in parts" * self.in_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class PointToPoint(Communication):
    """Base of the operations with the member `offset` places on in the group, cyclically."""

    offset: int

    @property
    def words(self) -> str:
        """Size and format: a send meets a receive."""
        return f"{self.size} {self.wire}"


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(CollectiveOperation):
    """Every rank brings `source`; `target`, N times as large, holds all of them in rank order."""

    name: ClassVar[str] = "all_gather"
    joins: ClassVar[bool] = True


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(ReducingOperation):
    """`source`, N times as large as `target`, is reduced over ranks; each keeps its own part."""

    name: ClassVar[str] = "reduce_scatter"
    splits: ClassVar[bool] = True


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce(ReducingOperation):
    """`target` on every rank is the reduction of all ranks' `source`."""

    name: ClassVar[str] = "all_reduce"
    laps: ClassVar[int] = 2  # a reduce-scatter and an all-gather


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast(CollectiveOperation):
    """`target` on every rank is the `source` of the group's member number `root`."""

    name: ClassVar[str] = "broadcast"
    root: int

    @property
    def agreed(self) -> tuple[object, ...]:
        """The root."""
        return (self.root,)

    @property
    def words(self) -> str:
        """The same in words, with the root."""
        return f"{self.name} of {self.size} {self.wire} from member {self.root}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(PointToPoint):
    """`source` goes to the member `offset` places on in the group, cyclically. A rendezvous."""

    name: ClassVar[str] = "send"
    source: View

    @property
    def reads(self) -> View | None:
        """The source."""
        return self.source


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive(PointToPoint):
    """`target` comes from the member `offset` places on in the group, cyclically. A rendezvous."""

    name: ClassVar[str] = "receive"
    target: View

    @property
    def writes(self) -> View | None:
        """The target."""
        return self.target


_KINDS = (AllGather, ReduceScatter, AllReduce, Broadcast, Send, Receive)
