"""The operations of a schedule, and the views they act on. All immutable values.

Every operation has an `id`: a path, unique in its program and stable when it is generated again
(`step/backward/mb1/unit7/reduce3`), which `after`, findings and traces name. On a stream it starts
when those before it there and those named in `after` have finished. `Allocate`, `Free`, `HostWait`,
`Branch` and `SetScalar` are actions of the host, taken when the host reaches them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from zsim.model.generator import Draw
from zsim.model.kernel import Kernel
from zsim.schedule.communication import (
    AllGather,
    AllReduce,
    Broadcast,
    CollectiveOperation,
    Communication,
    PointToPoint,
    Receive,
    ReduceScatter,
    ReducingOperation,
    Reduction,
    Send,
)
from zsim.schedule.quick_init import quick_init
from zsim.schedule.view import DIVISOR_MAX, Edge, OperationError, Previous, View
from zsim.strategy.optimizer_rule import Rule

__all__ = [
    "Action",
    "AllGather",
    "AllReduce",
    "Allocate",
    "Branch",
    "Broadcast",
    "CollectiveOperation",
    "Communication",
    "Compute",
    "Copy",
    "Edge",
    "Fill",
    "Free",
    "FreeMode",
    "HostWait",
    "Operand",
    "Operation",
    "OperationError",
    "PointToPoint",
    "Previous",
    "Read",
    "Receive",
    "ReduceScatter",
    "ReducingOperation",
    "Reduction",
    "Role",
    "Send",
    "SetScalar",
    "StreamOperation",
    "Together",
    "View",
    "Write",
    "walk",
]


class Action(StrEnum):
    """Actions of a `Compute`."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    UPDATE = "update"
    NORM = "norm"
    UNSCALE = "unscale"
    CLIP = "clip"
    FINITE = "finite"
    AMAX = "amax"
    INITIALIZE = "initialize"
    LOAD = "load"


BACKWARDS = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
"""Backward of a segment: as a whole, or in two parts, gradients of inputs and then of weights."""

OF_SEGMENTS = (Action.FORWARD, Action.RECOMPUTE, *BACKWARDS)
"""Actions that run a segment of a unit."""

MAKES_GRADIENTS = (Action.BACKWARD, Action.BACKWARD_WEIGHT)
"""Actions that make gradients of parameters."""


class Role(StrEnum):
    """Roles of operands in a `Compute`. WORKSPACE is held while it runs, and read by nobody.

    INTERMEDIATE_GRADIENT is what the first part of a backward leaves for the second: gradients of
    what operators with parameters have made.
    """

    INPUT = "input"
    OUTPUT = "output"
    PARAMETER = "parameter"
    SAVED = "saved"
    WORKSPACE = "workspace"
    OUTPUT_GRADIENT = "output_gradient"
    INPUT_GRADIENT = "input_gradient"
    INTERMEDIATE_GRADIENT = "intermediate_gradient"
    GRADIENT = "gradient"
    MOMENT = "moment"
    MASTER = "master"


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A view and what it is for. `partial` names the axes over which a written value is a summand.

    A parameter gradient is Partial over the data axes anyway: every rank has seen other data.
    """

    role: Role
    view: View
    partial: tuple[str, ...] = ()


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Allocate:
    """The host takes memory for `buffer`. A produced buffer is booked here and bound later."""

    id: str
    buffer: str


class FreeMode(StrEnum):
    """Modes of a free: how it waits for uses on streams other than the buffer's home stream."""

    WAITED = "waited"
    DEFERRED = "deferred"
    HOST = "host"


@quick_init
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


@quick_init
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
    gradient is not finite, else 0; AMAX the largest magnitude of each operand that it reads, in
    their order; INITIALIZE initial values of what the buffer's layout names,
    zero in the padding; LOAD a micro-batch of data. FORWARD and RECOMPUTE of a segment with
    dropout say what they `draw` with. A backward in two parts is BACKWARD_INPUT, then
    BACKWARD_WEIGHT of the same segment and micro-batch.
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


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Every element of `target` becomes `value`, times the host scalar `scalar` where named."""

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    target: View
    value: float
    scalar: str | None = None


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """`target` becomes (or, accumulating, grows by) `source` / `divisor`, cast to its dtype.

    With `by_parameter` both are whole buffers with layouts, less their room: what both hold of a
    parameter is copied, what none covers in the target becomes zero. It is `launches` kernels; none
    where the kernels that make the source do it as they go.
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
        if not 1 <= self.divisor <= DIVISOR_MAX:
            why = f"divisor {self.divisor} must be from 1 to {DIVISOR_MAX}"
            raise OperationError(f"{self.id}: {why}")
        if self.launches < 0:
            raise OperationError(f"{self.id}: launches {self.launches} must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FileTransfer(Copy):
    """A copy of bytes as they are: it neither casts, nor divides, nor adds."""

    def __post_init__(self) -> None:
        if self.accumulate or self.by_parameter or (self.divisor, self.launches) != (1, 1):
            raise OperationError(f"{self.id}: a {type(self).__name__} copies bytes as they are")


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Read(_FileTransfer):
    """Bytes of a file on NVMe go to memory: the host's, or with GPUDirect Storage the device's.

    The stream is an I/O handle, which takes its requests first in, first out (DeepSpeed
    `csrc/aio`): to wait on a handle is a `HostWait` for its last operation.
    """


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Write(_FileTransfer):
    """Bytes of memory go to a file on NVMe, on the stream of an I/O handle, as a `Read` does."""


@quick_init
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
    """The host waits for `after`, reads a number, and runs `then` if it is not zero.

    Otherwise it runs `otherwise`. The number is one element, `value`, or `scalar`, which the host
    counts itself. A value is the output of a collective over a group that holds every rank that
    runs the branch. `after` on an operation of the list not taken is satisfied.
    """

    id: str
    after: tuple[Edge, ...] = ()
    value: View | None = None
    scalar: str | None = None
    then: tuple["Operation", ...]
    otherwise: tuple["Operation", ...]

    @property
    def number(self) -> View | str:
        """Return what it reads: a view, or the name of a scalar."""
        return self.value or self.scalar or ""


StreamOperation = Compute | Communication | Together | Fill | Copy | Read | Write
"""Operations that run on a stream; the others are actions of the host."""

Operation = Allocate | Free | StreamOperation | HostWait | SetScalar | Branch


def walk(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield all in program order, both lists of a branch after it; no members of a `Together`."""
    for operation in operations:
        yield operation
        if type(operation) is Branch:
            yield from walk(operation.then)
            yield from walk(operation.otherwise)
