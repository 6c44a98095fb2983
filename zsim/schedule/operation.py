"""The operations of a schedule, and the views they act on. All immutable values.

Every operation has an `id`: a path, unique in its program and stable when it is generated again
(`step/backward/mb1/unit7/reduce3`), which `after`, findings and traces name. On a stream it starts
when those before it there and those named in `after` have finished. `Allocate`, `Free`, `HostWait`,
`Branch` and `SetScalar` are actions of the host, taken when the host reaches them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from zsim.dtype import DType
from zsim.model.generator import Draw
from zsim.model.kernel import Kernel
from zsim.strategy.optimizer_rule import Rule


class OperationError(ValueError):
    """An operation that cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """`size` elements of `buffer` from `start` on.

    With `axis`, the start grows by the rank's coordinate along it times `size`: the own shard. With
    `layout`, `start` and `size` are a window on that whole tensor, and the view is what the rank's
    segment has of it, or nothing: so are named parts of uneven shards, and single parameters. The
    buffer holds the rank's segment or, with `origin`, the window, from its element `origin` on.
    """

    buffer: str
    start: int = 0
    size: int
    axis: str | None = None
    layout: str | None = None
    origin: int | None = None

    def __post_init__(self) -> None:
        where = f"view of {self.buffer}"
        if self.start < 0 or self.size < 0:
            raise OperationError(f"{where}: start {self.start} and size {self.size} must be >= 0")
        if self.axis is not None and self.layout is not None:
            raise OperationError(f"{where}: name an axis or a layout, not both")
        if self.origin is not None and (self.layout is None or self.origin < 0):
            raise OperationError(f"{where}: origin {self.origin} needs a layout, and to be >= 0")


@dataclass(frozen=True, slots=True)
class Previous:
    """An edge to the latest earlier instance of `operation` that ran; setup counts as one."""

    operation: str


Edge = str | Previous
"""What must have finished: an operation by id, or its previous instance."""


class Action(StrEnum):
    """What a `Compute` does."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    UPDATE = "update"
    NORM = "norm"
    UNSCALE = "unscale"
    CLIP = "clip"
    FINITE = "finite"
    INITIALIZE = "initialize"
    LOAD = "load"


class Role(StrEnum):
    """What an operand is to its `Compute`. WORKSPACE is held while it runs, and read by nobody."""

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"
    SAVED = "saved"
    WORKSPACE = "workspace"
    OUTPUT_GRADIENT = "output_gradient"
    INPUT_GRADIENT = "input_gradient"
    GRADIENT = "gradient"
    MOMENT = "moment"
    MASTER = "master"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A view and what it is for. `partial` names the axes over which a written value is a summand.

    A parameter gradient is Partial over the data axes anyway: every rank has seen other data.
    """

    role: Role
    view: View
    partial: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """The host takes memory for `buffer`. A produced buffer is booked here and bound later."""

    id: str
    buffer: str


class FreeMode(StrEnum):
    """How a free waits for uses on streams other than the buffer's home stream."""

    WAITED = "waited"
    DEFERRED = "deferred"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """The host gives the memory of `buffer` back; `uses` on other streams touched it.

    WAITED: the home stream waits for them, and the block may be used again at once by an `Allocate`
    on the same home stream. DEFERRED (record_stream): the memory returns at the first `Allocate`
    that the host issues after they finished. HOST: the host waits for them first.
    """

    id: str
    buffer: str
    mode: FreeMode = FreeMode.WAITED
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One segment of a unit for one micro-batch, or a step of the optimizer on a shard.

    Parameter and gradient operands follow the order of the unit's parameters. What each action
    reads and writes is `accesses`. `scalars` are read as the host issues it: the step for UPDATE
    (its rule may name another, the learning rate), the loss scale for UNSCALE and CLIP.

    UPDATE has a rule (Adam or SGD) and element-wise operands of one size; Adam's moments are first
    and second, in this order, SGD's is its momentum buffer. CLIP has a `ClipNorm` and reads one
    element, the sum of squares. NORM writes the sum of squares of its gradients, each logical
    element counted once over ranks that hold copies (the layout says which); FINITE 1 where a
    gradient is not finite, else 0; INITIALIZE initial values of what the buffer's layout names,
    zero in the padding; LOAD a micro-batch of data. FORWARD and RECOMPUTE of a segment with
    dropout say what they `draw` with.
    """

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    action: Action
    unit: str = ""
    segment: int = 0
    micro_batch: int = 0
    operands: tuple[Operand, ...]
    kernels: tuple[Kernel, ...] = ()
    scalars: tuple[str, ...] = ()
    rule: Rule | None = None
    draw: Draw | None = None


AFTER_OTHERS = {"written_after_others": True}
"""Of a field that stands behind the others in a file."""


class Reduction(StrEnum):
    """How a reduction combines what the ranks bring."""

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
        """What ranks that meet agree on beside name, size and wire format."""
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
    """

    laps: ClassVar[int] = 1
    splits: ClassVar[bool] = False
    joins: ClassVar[bool] = False
    moves_in_place: ClassVar[bool] = True

    source: View
    target: View

    @property
    def reads(self) -> View | None:
        """The source."""
        return self.source

    @property
    def writes(self) -> View | None:
        """The target."""
        return self.target

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
        """Format and kind of the reduction."""
        return self.accumulate, self.reduction

    @property
    def words(self) -> str:
        """The same in words, with the reduction."""
        return f"{self.name} ({self.reduction}) of {self.size} {self.wire} in {self.accumulate}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointToPoint(Communication):
    """Base of the operations with the member `offset` places on in the group, cyclically."""

    offset: int

    @property
    def words(self) -> str:
        """Size and format: a send meets a receive."""
        return f"{self.size} {self.wire}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllGather(CollectiveOperation):
    """Every rank brings `source`; `target`, N times as large, holds all of them in rank order."""

    name: ClassVar[str] = "all_gather"
    joins: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceScatter(ReducingOperation):
    """`source`, N times as large as `target`, is reduced over ranks; each keeps its own part."""

    name: ClassVar[str] = "reduce_scatter"
    splits: ClassVar[bool] = True


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Several operations of one group issued as one (ncclGroupStart, coalescing).

    They start together and finish together; the members name no edges of their own.
    """

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    members: tuple[Communication, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise OperationError(f"{self.id}: a Together needs at least one member")
        if len({member.group for member in self.members}) != 1:
            raise OperationError(f"{self.id}: members of a Together share one group")
        for member in self.members:
            if member.after or member.stream != self.stream:
                raise OperationError(
                    f"{member.id}: a member of a Together is on its stream and names no edges"
                )

    @property
    def group(self) -> str:
        """Group that all members use."""
        return self.members[0].group


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Every element of `target` becomes `value`, times the host scalar `scalar` where named."""

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    target: View
    value: float
    scalar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`target` becomes (or, accumulating, grows by) `source` / `divisor`, cast to its dtype.

    With `by_parameter` both are whole buffers with layouts, less their room: what both hold of a
    parameter is copied, what none covers in the target becomes zero. It is `launches` kernels.
    """

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    source: View
    target: View
    accumulate: bool = False
    divisor: int = 1
    by_parameter: bool = False
    launches: int = 1

    def __post_init__(self) -> None:
        if (least := min(self.divisor, self.launches)) < 1:
            raise OperationError(f"{self.id}: divisor {least} or launches must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWait:
    """The host stops until `operation` has finished."""

    id: str
    operation: Edge


@dataclass(frozen=True, slots=True, kw_only=True)
class SetScalar:
    """The host scalar becomes scalar * multiply + add, kept within `minimum` and `maximum`.

    With `counter` and `every`, only when the host scalar `counter` is a multiple of `every`.
    """

    id: str
    scalar: str
    multiply: float = 1.0
    add: float = 0.0
    minimum: float = 0.0
    maximum: float = float(2**53)
    counter: str | None = None
    every: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The host waits for `after`, reads one element, and runs `then` if it is not zero.

    Otherwise it runs `otherwise`. The value is the output of a collective over a group that holds
    every rank that runs the branch. `after` on an operation of the list not taken is satisfied.
    """

    id: str
    after: tuple[Edge, ...]
    value: View
    then: tuple["Operation", ...]
    otherwise: tuple["Operation", ...]


StreamOperation = Compute | Communication | Together | Fill | Copy
"""Operations that run on a stream; the others are actions of the host."""

Operation = Allocate | Free | StreamOperation | HostWait | SetScalar | Branch


def walk(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield all in program order, both lists of a branch after it; no members of a `Together`."""
    for operation in operations:
        yield operation
        if type(operation) is Branch:
            yield from walk(operation.then)
            yield from walk(operation.otherwise)
