"""The operations of a schedule, and the views they act on. All are immutable values.

Every operation has an `id`: a path, unique in its program and the same each time the schedule is
generated (`step/backward/mb1/unit7/reduce3`). `after`, findings and traces refer to it. On a
stream an operation starts when earlier ones of the stream and those named in `after` have
finished. `Allocate`, `Free`, `HostWait`, `Branch` and `SetScalar` are actions of the host, which
it carries out as it reaches them.

Operations hold only values, so they are in no cycle: the garbage collector need not track them.
"""

from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct

from zsim.model.generator import Draw
from zsim.model.kernel import Kernel
from zsim.schedule.communication import (
    AllGather,
    AllReduce,
    AllToAll,
    AnyCommunication,
    Broadcast,
    CollectiveOperation,
    Communication,
    PointToPoint,
    Receive,
    ReduceScatter,
    ReducingOperation,
    Reduction,
    Send,
    listed,
)
from zsim.schedule.view import DIVISOR_MAX, Edge, OperationError, Previous, View
from zsim.strategy.optimizer_rule import Rule

__all__ = [
    "Action",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Allocate",
    "AnyCommunication",
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
    "ReadCounts",
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
    "listed",
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
    COMPRESS = "compress"
    DECOMPRESS = "decompress"
    RESIDUAL = "residual"
    INITIALIZE = "initialize"
    LOAD = "load"


BACKWARDS = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
"""Backward of a segment: as a whole, or first gradients of inputs and then of weights."""

OF_SEGMENTS = (Action.FORWARD, Action.RECOMPUTE, *BACKWARDS)
"""Actions that run a segment of a unit."""

MAKES_GRADIENTS = (Action.BACKWARD, Action.BACKWARD_WEIGHT)
"""Actions that make gradients of parameters."""


class Role(StrEnum):
    """Roles of operands in a `Compute`. WORKSPACE is allocated while it runs and never read.

    INTERMEDIATE_GRADIENT is passed from the first part of a backward to the second: the gradients
    of the outputs of operators with parameters.
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


class Operand(Struct, frozen=True, kw_only=True, gc=False):
    """A view and its role. A written value must still be summed over the axes in `partial`.

    A parameter gradient is always partial over the data axes: every rank has different data.
    """

    role: Role
    view: View
    partial: tuple[str, ...] = ()


class Allocate(Struct, frozen=True, kw_only=True, gc=False):
    """The host allocates `buffer`. A produced buffer is only counted here, and bound later.

    A buffer whose rows are counted has the rows of `micro_batch`.
    """

    id: str
    buffer: str
    micro_batch: int | None = None


class FreeMode(StrEnum):
    """Modes of a free: how it waits for uses on streams other than the buffer's home stream."""

    WAITED = "waited"
    DEFERRED = "deferred"
    HOST = "host"


class Free(Struct, frozen=True, kw_only=True, gc=False):
    """The host frees the memory of `buffer`, which `uses` on other streams touched.

    WAITED: the home stream waits for them, and an `Allocate` on the same home stream may reuse the
    block at once. DEFERRED (record_stream): the memory returns at the first `Allocate` that the
    host issues after they finished. HOST: the host waits for them first.
    """

    id: str
    buffer: str
    mode: FreeMode = FreeMode.WAITED
    uses: tuple[str, ...] = ()


class Compute(Struct, frozen=True, kw_only=True, gc=False):
    """One segment of a unit for one micro-batch, or a step of the optimizer on a shard.

    Parameter and gradient operands follow the order of the unit's parameters. `accesses` states
    which operands each action reads and writes. The host reads `scalars` when it issues the
    operation: the step for UPDATE (its rule may name another, the learning rate), the loss scale
    for UNSCALE and CLIP.

    UPDATE has an element-wise rule and operands of one size; moments are in the order of the rule's
    `states`. CLIP has a `ClipNorm` and reads one
    element, the sum of squares. NORM writes the sum of squares of its gradients and counts each
    logical element once over ranks that hold copies (stated by the layout). FINITE writes 1 if a
    gradient is not finite, else 0. AMAX writes the largest magnitude of each operand that it
    reads, in their order. INITIALIZE writes initial values of the parameters in the buffer's
    layout, and zero padding. LOAD writes a micro-batch of data. FORWARD and RECOMPUTE of a segment
    with dropout have a `draw` of random numbers. A backward in two parts is BACKWARD_INPUT, then
    BACKWARD_WEIGHT of the same segment and micro-batch. COMPRESS multiplies a gradient by one
    factor, and writes the other. DECOMPRESS multiplies the factors, in the order in which they were
    written. RESIDUAL writes the difference of an uncompressed copy and the gradient.
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


class Together(Struct, frozen=True, kw_only=True, gc=False):
    """Several operations of one group issued as one (ncclGroupStart, coalescing).

    They start and finish at the same time; the members have no `after`.
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


class Fill(Struct, frozen=True, kw_only=True, gc=False):
    """Set every element of `target` to `value`, times the host scalar `scalar` if given."""

    id: str
    stream: str
    after: tuple[Edge, ...] = ()
    target: View
    value: float
    scalar: str | None = None


class Copy(Struct, frozen=True, kw_only=True, gc=False):
    """Set `target` to `source` / `divisor`, or with `accumulate` add it; cast to the target.

    With `by_parameter` the views are whole buffers with layouts, without room beyond the layout.
    Elements of parameters that both hold are copied; others of the target become zero. The copy is
    `launches` kernels; 0 if the kernels that make the source also write the copy.
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


class _FileTransfer(Copy, frozen=True, kw_only=True):
    """A copy of unchanged bytes: without cast, division or addition."""

    def __post_init__(self) -> None:
        if self.accumulate or self.by_parameter or (self.divisor, self.launches) != (1, 1):
            raise OperationError(f"{self.id}: a {type(self).__name__} copies bytes as they are")


class Read(_FileTransfer, frozen=True, kw_only=True):
    """Read bytes of a file on NVMe into host memory, or device memory with GPUDirect Storage.

    The stream is an I/O handle, which serves requests first in, first out (DeepSpeed `csrc/aio`):
    a wait on a handle is a `HostWait` for its last operation.
    """


class Write(_FileTransfer, frozen=True, kw_only=True):
    """Write bytes of host memory to a file on NVMe, on a stream of file requests."""


class HostWait(Struct, frozen=True, kw_only=True, gc=False):
    """The host blocks until `operation` has finished."""

    id: str
    operation: Edge


class ReadCounts(HostWait, frozen=True, kw_only=True, gc=False):
    """The host waits for `operation` and reads from `source` the rows that the rank receives.

    The rows are counted by `count` in a layer and micro-batch, with a number for each source and
    each expert of the rank. It is the only operation in which a named count has numbers.
    """

    source: View
    count: str
    layer: int = 0
    micro_batch: int = 0


class SetScalar(Struct, frozen=True, kw_only=True, gc=False):
    """Set the host scalar to scalar * multiply + add, clamped to `minimum` and `maximum`.

    With `counter` and `every`, only if the host scalar `counter` is a multiple of `every`.
    """

    id: str
    scalar: str
    multiply: float = 1.0
    add: float = 0.0
    minimum: float = 0.0
    maximum: float = float(2**53)
    counter: str | None = None
    every: int = 1


class Branch(Struct, frozen=True, kw_only=True, gc=False):
    """The host waits for `after`, reads a number, and runs `then` if it is not zero.

    Otherwise it runs `otherwise`. The number is one element, `value`, or `scalar`, which the host
    counts itself. A value is the output of a collective over a group that holds every rank that
    runs the branch. An `after` that names an operation of the list not taken counts as satisfied.
    """

    id: str
    after: tuple[Edge, ...] = ()
    value: View | None = None
    scalar: str | None = None
    then: tuple["Operation", ...]
    otherwise: tuple["Operation", ...]

    @property
    def number(self) -> View | str:
        """The view or the name of the scalar that the branch reads."""
        return self.value or self.scalar or ""


StreamOperation = Compute | Communication | Together | Fill | Copy | Read | Write
"""Operations that run on a stream; the others are actions of the host."""

Operation = Allocate | Free | StreamOperation | HostWait | ReadCounts | SetScalar | Branch


def walk(operations: Iterable[Operation]) -> Iterator[Operation]:
    """Yield operations in program order, both lists of a branch after it; no Together members."""
    for operation in operations:
        yield operation
        if type(operation) is Branch:
            yield from walk(operation.then)
            yield from walk(operation.otherwise)
