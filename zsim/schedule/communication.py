"""Operations of communicators. Each class states the properties that all readers query.

A new operation is a class with these attributes, listed in `AnyCommunication`. Its effect on values
is defined where values are computed: the proof, the simulator's exact values, and the torch
backend. `zsim.schedule.operation_kinds` lists these places, and a type checker names each of them.
"""

from enum import StrEnum
from typing import ClassVar, get_args

from msgspec import Struct

from zsim.dtype import DType
from zsim.model.expert_transport import ExpertTransport
from zsim.schedule.view import Edge, View


class Reduction(StrEnum):
    """Reductions of a collective over its ranks."""

    SUM = "sum"
    AVERAGE = "average"
    MAX = "max"


class Communication(Struct, frozen=True, kw_only=True, gc=False):
    """Base class of the operations of a communicator.

    Readers of schedules use only these attributes, so a new operation is defined in one place:
    which views it reads and writes, how they are split, and how they are combined.

    Class attributes:
        name: name in reports and contracts, as in NCCL's tests.
        laps: how many times (N - 1) / N of the bytes pass through each rank's link.
        sends: the data that a rank sends, and its receivers; empty if it sends nothing.
        meets: the operations of other ranks that it meets.
        written_last: fields that a file lists after the other fields.
    """

    name: ClassVar[str]
    laps: ClassVar[int] = 0
    sends: ClassVar[str]
    meets: ClassVar[str]
    written_last: ClassVar[tuple[str, ...]] = ("wire", "in_parts", "beside", "accumulate")

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    group: str
    wire: DType

    @staticmethod
    def kinds() -> tuple[type["Communication"], ...]:
        """Return the classes of all communicator operations."""
        return get_args(AnyCommunication)

    @property
    def reads(self) -> View | None:
        """The view that a rank contributes, or None."""
        return None

    @property
    def writes(self) -> View | None:
        """The view that a rank receives into, or None."""
        return None

    @property
    def brought(self) -> View:
        """The view that a rank contributes, or the one it receives into if it contributes none."""
        view = self.reads or self.writes
        assert view is not None
        return view

    @property
    def whole(self) -> View:
        """The view of the whole tensor: all ranks' parts if it is split."""
        return self.brought

    @property
    def size(self) -> int:
        """Number of elements on which matching ranks must agree: of one part, or of the whole."""
        return self.whole.size

    @property
    def agreed(self) -> tuple[object, ...]:
        """Attributes on which matching ranks must agree, besides name, size and wire format."""
        return ()

    @property
    def words(self) -> str:
        """Text with everything on which matching ranks must agree."""
        return f"{self.name} of {self.size} {self.wire}"

    def addressed(self, members: int) -> tuple[int, ...]:
        """Return the numbers of members whose place changes what the others of `members` receive.

        The proof does not represent such a member by another one.
        """
        del members  # only operations that address members depend on their number
        return ()


class CollectiveOperation(Communication, frozen=True, kw_only=True):
    """Base class of operations in which every rank of a group sends and receives.

    Class attributes:
        splits: the source has one block per member; each member receives the block of its number.
        joins: the target has one block from each member, in member order.
        moves_in_place: one view may be both source and target. If only one of them is split, the
            other may be the rank's own slot in it.

    A collective with `in_parts` is fused with the `Compute` that reads the gathered tensor or
    makes the scattered one: ranks copy parts from each other while kernels of that `Compute` work
    on other parts (`zsim.schedule.fusions`). The result is the same. A collective with `beside` is
    an ordinary one on the wire; it overlaps kernels of such a `Compute` that do not touch the data
    it moves.
    """

    laps: ClassVar[int] = 1
    meets: ClassVar[str] = "members of a communicator issue the same sequence"
    splits: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    moves_in_place: ClassVar[bool] = True

    source: View
    target: View
    in_parts: bool = False
    beside: bool = False

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
        """Whether it is in parts: an NCCL kernel does not match a collective that copies parts."""
        return (self.in_parts,)

    @property
    def words(self) -> str:
        """Text with everything on which matching ranks must agree."""
        return f"{self.name} of {self.size} {self.wire}{' in parts' * self.in_parts}"

    @property
    def whole(self) -> View:
        """The larger of source and target."""
        return self.target if self.joins else self.source

    @property
    def part(self) -> View | None:
        """The view that is one rank's part of the whole, or None if neither is."""
        if self.splits is self.joins:
            return None
        return self.source if self.joins else self.target

    @property
    def size(self) -> int:
        """Number of elements of a part, or of the whole if there are no parts."""
        return (self.part or self.whole).size


class ReducingOperation(CollectiveOperation, frozen=True, kw_only=True):
    """Base class of collectives that reduce over ranks, in the format `accumulate`."""

    reduction: Reduction = Reduction.SUM
    accumulate: DType

    @property
    def agreed(self) -> tuple[object, ...]:
        """Whether it is in parts, the accumulation format and the reduction."""
        return self.in_parts, self.accumulate, self.reduction

    @property
    def words(self) -> str:
        """Text with everything on which matching ranks must agree, with the reduction."""
        of = f"{self.name} ({self.reduction}) of {self.size} {self.wire} in {self.accumulate}"
        return of + " in parts" * self.in_parts


class PointToPoint(Communication, frozen=True, kw_only=True):
    """Base class of sends and receives with the member `offset` places further, cyclically."""

    meets: ClassVar[str] = "the n-th send to a member meets its n-th receive"
    offset: int

    @property
    def words(self) -> str:
        """Text with size and format only, since a send matches a receive."""
        return f"{self.size} {self.wire}"


class AllGather(CollectiveOperation, frozen=True, kw_only=True):
    """Every rank contributes `source`; `target`, N times as large, holds them all in rank order."""

    name: ClassVar[str] = "all_gather"
    sends: ClassVar[str] = "its source to all members"
    joins: ClassVar[bool] = True


class ReduceScatter(ReducingOperation, frozen=True, kw_only=True):
    """`source`, N times as large as `target`, is reduced over ranks; each keeps its own part."""

    name: ClassVar[str] = "reduce_scatter"
    sends: ClassVar[str] = "block i of its source to member i"
    splits: ClassVar[bool] = True


class AllReduce(ReducingOperation, frozen=True, kw_only=True):
    """`target` on every rank is the reduction of all ranks' `source`."""

    name: ClassVar[str] = "all_reduce"
    sends: ClassVar[str] = "its source to all members"
    laps: ClassVar[int] = 2  # a reduce-scatter and an all-gather


class Broadcast(CollectiveOperation, frozen=True, kw_only=True):
    """`target` on every rank is the `source` of the group's member number `root`."""

    name: ClassVar[str] = "broadcast"
    sends: ClassVar[str] = "the source of the root to all members"
    root: int

    @property
    def agreed(self) -> tuple[object, ...]:
        """The root."""
        return (self.root,)

    @property
    def words(self) -> str:
        """Text with everything on which matching ranks must agree, with the root."""
        return f"{self.name} of {self.size} {self.wire} from member {self.root}"

    def addressed(self, members: int) -> tuple[int, ...]:
        """Return the number of the root."""
        return (self.root,) if self.root < members else ()


class AllToAll(CollectiveOperation, frozen=True, kw_only=True):
    """Block i of each rank's `source` goes to member i; `target` has a block from each member.

    Blocks are equal unless `sent` and `received` have their elements by member; `kept` is the block
    that a rank sends to itself, the same on all ranks of a role. A library may exchange them in
    place of NCCL (`by`), with the same result.
    """

    name: ClassVar[str] = "all_to_all"
    sends: ClassVar[str] = "block i of its source to member i"
    splits: ClassVar[bool] = True
    joins: ClassVar[bool] = True
    moves_in_place: ClassVar[bool] = False
    written_last: ClassVar[tuple[str, ...]] = (
        *CollectiveOperation.written_last,
        *("sent", "received", "kept", "by"),
    )

    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    kept: int | None = None
    by: ExpertTransport | None = None

    @property
    def whole(self) -> View:
        """The source; a rank may receive another size."""
        return self.source

    @property
    def size(self) -> int:
        """Number of elements of the source; 0 if each pair of members agrees on its own."""
        return 0 if self.sent else self.source.size

    @property
    def agreed(self) -> tuple[object, ...]:
        """Whether it is in parts, whether blocks are equal, and the library."""
        return self.in_parts, not self.sent, self.by

    @property
    def words(self) -> str:
        """Text with everything on which matching ranks must agree."""
        of = f"{self.name} of unequal blocks of {self.wire}" if self.sent else super().words
        return of if self.by is None else f"{of} by {self.by.library}"

    @property
    def largest(self) -> int:
        """Elements that a rank exchanges with others, in the direction with more of them."""
        if not self.sent:
            return self.source.size
        return max(sum(self.sent), sum(self.received)) - (self.kept or 0)

    def block(self, member: int, members: int) -> slice:
        """Return the place in the source of the block for `member` of `members`."""
        if not self.sent:
            size = self.source.size // members
            return slice(member * size, (member + 1) * size)
        start = sum(self.sent[:member])
        return slice(start, start + self.sent[member])

    def addressed(self, members: int) -> tuple[int, ...]:
        """Return all members: each receives another block."""
        return tuple(range(members))


class Send(PointToPoint, frozen=True, kw_only=True):
    """Send `source` to the member `offset` places further, cyclically. A rendezvous."""

    name: ClassVar[str] = "send"
    sends: ClassVar[str] = "its source to the member `offset` places further"
    source: View

    @property
    def reads(self) -> View | None:
        """The source."""
        return self.source


class Receive(PointToPoint, frozen=True, kw_only=True):
    """Receive `target` from the member `offset` places further, cyclically. A rendezvous."""

    name: ClassVar[str] = "receive"
    sends: ClassVar[str] = ""
    target: View

    @property
    def writes(self) -> View | None:
        """The target."""
        return self.target


AnyCommunication = AllGather | ReduceScatter | AllReduce | Broadcast | AllToAll | Send | Receive
"""All operations of communicators. A match over these kinds ends with `assert_never`."""


def listed(operation: Communication) -> AnyCommunication:
    """Return `operation` as one of the kinds that `AnyCommunication` lists.

    Raises:
        TypeError: its class is not listed.
    """
    if isinstance(operation, AnyCommunication):
        return operation
    raise TypeError(f"{operation.id}: {type(operation).__name__} is not in AnyCommunication")
