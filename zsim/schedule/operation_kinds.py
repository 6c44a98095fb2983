"""One table of the kinds of operations: what each one states, and the code that must know it.

A new kind of communication is a class in `AnyCommunication`, whose attributes are its row here, and
its effect on values in each interpreter of `VALUES`. All other readers use the attributes of
`Communication`. Every interpreter ends its match with `assert_never`, so a type checker names those
that lack a kind.
"""

from dataclasses import dataclass

from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Read,
    ReadCounts,
    SetScalar,
    Together,
    Write,
)

READERS = (
    "zsim.schedule.access:accesses",
    "zsim.schedule.validate:_inspect_operation",
    "zsim.proof.execution.interpreter:_host",
    "zsim.cluster.profile.host_launch:_alone_ps",
    "zsim.analysis.time_breakdown:_kind",
    "zsim.report.svg.lane:_sort",
    "zsim.trace.kineto:_kernel",
    "zsim_des.engine.lowering:_instruction",
    "zsim_torch.execute.executor:_bound",
)
"""Functions that match every operation; they know a communication by its base class."""

VALUES = (
    "zsim.proof.execution.collective_runner:meet",
    "zsim_des.values.exchange:received",
    "zsim_torch.execute.collectives:_hand_over",
    "zsim_torch.execute.collectives:received",
)
"""Functions that give each kind of communication its effect on values, each one separately."""

LOCAL_VALUES = (
    "zsim.compute.roofline:touched_bytes",
    "zsim_des.values.marks:apply",
    "zsim_des.values.modular:apply",
    "zsim_torch.values:apply",
)
"""Functions with the effect or the traffic of operations that no other rank takes part in."""

ON_HOST = "in issue order of the host"
ON_STREAM = "after earlier operations of its stream and those in `after`"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationKind:
    """A row of the table.

    Attributes:
        kind: the class of the operation.
        operands: its fields that hold views, or values with views.
        sends: the data that a rank sends, and its receivers; empty if it sends nothing.
        order: the operations after which it runs.
        interpreters: the functions that must know it, as MODULE:FUNCTION.
    """

    kind: type[Operation]
    operands: tuple[str, ...] = ()
    sends: str = ""
    order: str
    interpreters: tuple[str, ...] = READERS

    @property
    def laps(self) -> int:
        """How many times (N - 1) / N of the whole tensor pass the link of each of N ranks."""
        return self.kind.laps if issubclass(self.kind, Communication) else 0


def _communication(kind: type[Communication]) -> OperationKind:
    return OperationKind(
        kind=kind,
        operands=tuple(name for name in ("source", "target") if name in kind.__struct_fields__),
        sends=kind.sends,
        order=f"{ON_STREAM}; {kind.meets}",
        interpreters=READERS + VALUES,
    )


def _local(kind: type[Compute | Copy | Fill], *operands: str) -> OperationKind:
    return OperationKind(
        kind=kind, operands=operands, order=ON_STREAM, interpreters=READERS + LOCAL_VALUES
    )


KINDS = (
    OperationKind(kind=Allocate, order=ON_HOST),
    OperationKind(kind=Free, order=ON_HOST),
    _local(Compute, "operands"),
    *map(_communication, Communication.kinds()),
    OperationKind(
        kind=Together,
        operands=("members",),
        sends="as its members",
        order=f"{ON_STREAM}; all its members meet theirs",
    ),
    _local(Fill, "target"),
    _local(Copy, "source", "target"),
    _local(Read, "source", "target"),
    _local(Write, "source", "target"),
    OperationKind(kind=HostWait, order=ON_HOST),
    OperationKind(kind=ReadCounts, operands=("source",), order=ON_HOST),
    OperationKind(kind=SetScalar, order=ON_HOST),
    OperationKind(kind=Branch, operands=("value", "then", "otherwise"), order=ON_HOST),
)
"""All kinds of operations."""
