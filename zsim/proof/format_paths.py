"""Formats of data on the path to an update or a segment: never narrower than at the reader.

A master that is cast to bf16 and back has lost its last bits, though both ends are in fp32. From
the operands that updates and segments read, data is followed backwards through copies, reads and
writes of files and communication of any step, to the source buffers. Each of these must be as wide
as the operand: states of updates as the optimizer's format, parameters of segments as that of the
computations, gradients as the narrower one of the computations and the reductions. Buffers are
followed as a whole: if parts of one have several uses, the widest counts. Setup is not checked,
since training starts from its result.

Cost: linear in the number of operations, without those that micro-batches repeat.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

from zsim.dtype import DType
from zsim.schedule.operation import (
    OF_SEGMENTS,
    Action,
    CollectiveOperation,
    Compute,
    Copy,
    Operand,
    Receive,
    ReducingOperation,
    Role,
    Send,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.runtime_options import Formats

BITS = {
    DType.NF4: (0, 3),
    DType.INT8: (0, 7),
    DType.INT64: (0, 63),
    DType.FP8: (4, 3),
    DType.FP16: (5, 10),
    DType.BF16: (8, 7),
    DType.FP32: (8, 23),
    DType.FP64: (11, 52),
}
"""Bits of exponent and fraction: IEEE 754-2019, bfloat16 of Intel 2018, E4M3 of Micikevicius et al.
2022. An integer has no exponent, nor has an entry of the table of nf4."""
assert set(BITS) == set(DType)

Node = tuple[int, str]
"""A buffer: the number of its program, and its name."""

WORDS = {
    Role.MASTER: "a master",
    Role.MOMENT: "a moment",
    Role.PARAMETER: "a parameter",
    Role.GRADIENT: "a gradient",
    Role.INPUT: "a norm",
}
"""Operands that are followed, with their names in messages."""

SUMMED = (Role.GRADIENT, Role.INPUT)
"""Operands that ranks add up in their own formats, which `zsim.proof.formats` compares."""

OF_OPTIMIZER = {
    Action.UPDATE: (Role.MASTER, Role.MOMENT, Role.PARAMETER, Role.GRADIENT),
    Action.CLIP: (Role.INPUT,),
}


@cache
def is_narrower(one: DType, other: DType) -> bool:
    """Return True if format `one` has less precision or less range than `other`."""
    return any(mine < theirs for mine, theirs in zip(BITS[one], BITS[other], strict=True))


def updated_format(wanted: Formats, role: Role) -> DType:
    """Return the format in which an update reads operands of `role`."""
    narrow = {
        Role.GRADIENT: wanted.applied,
        Role.MASTER: wanted.master,
        Role.MOMENT: wanted.moment,
    }
    return narrow.get(role) or wanted.optimizer


class Narrower(Protocol):
    """Returns True if a buffer is narrower than a format; some may be `gathered` in 8 bits."""

    def __call__(self, program: Program, name: str, dtype: DType, /, *, gathered: bool) -> bool:
        """Return True if it is."""
        ...


class NarrowPassage(NamedTuple):
    """An operation that copies from a buffer too narrow for a later reader."""

    role: str
    operation: str
    why: str


class BufferEdge(NamedTuple):
    """An operation of a role that fills a buffer, and its source buffer.

    Attributes:
        added: the format in which it sums over ranks; None if it does not sum.
    """

    source: Node
    role: str
    operation: str
    added: DType | None = None


_Channel = tuple[object, ...]
"""Messages of one group and size, or a collective in which several roles meet."""


class _Need(NamedTuple):
    """Operands that are read as `role` need a format; some may be `gathered` in 8 bits."""

    role: Role
    gathered: bool


def passages(
    schedule: Schedule, wanted: Formats, holds_narrower: Narrower
) -> Iterator[NarrowPassage]:
    """Yield each operation that passes on data from a narrower buffer, once."""
    graph = _BufferGraph(several=len(schedule.programs) > 1)
    for index, program in enumerate(schedule.programs):
        graph.enter(index, program)
    least = min(wanted.compute, wanted.reduction, key=lambda each: each.size_bytes)
    found: set[tuple[str, str]] = set()
    for need in sorted(graph.starts, key=lambda each: each.gathered):  # states, then casts
        dtype = least if need.role is Role.GRADIENT else updated_format(wanted, need.role)
        dtype = wanted.compute if need.gathered else dtype
        seen = set(graph.starts[need])
        ahead = list(seen)
        met: set[_Channel] = set()
        while ahead:
            for (index, name), role, operation, added in graph.edges(ahead.pop(), met):
                adds = added is not None and need.role not in SUMMED and is_narrower(added, dtype)
                if adds and (role, operation) not in found:
                    found.add((role, operation))
                    why = f"adds up {WORDS[need.role]} in {added}, and not in {dtype}"
                    yield NarrowPassage(role, operation, why)
                if (index, name) in seen:
                    continue
                seen.add((index, name))
                program = schedule.programs[index]
                if not holds_narrower(program, name, dtype, gathered=need.gathered):
                    ahead.append((index, name))
                elif (role, operation) not in found:
                    found.add((role, operation))
                    kept = program.by_name[name].dtype
                    why = f"passes on {WORDS[need.role]} from {name} in {kept}, and not in {dtype}"
                    yield NarrowPassage(role, operation, why)


def _added(operation: Copy | CollectiveOperation) -> DType | None:
    """Return the format in which a collective sums; None if it does not sum."""
    return operation.accumulate if isinstance(operation, ReducingOperation) else None


@dataclass(slots=True)
class _BufferGraph:
    """The edges between buffers, and the buffers from which they are followed backwards."""

    several: bool
    into: dict[Node, list[BufferEdge]] = field(default_factory=lambda: defaultdict(list))
    starts: dict[_Need, dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))
    sent: dict[_Channel, dict[Node, None]] = field(default_factory=lambda: defaultdict(dict))
    received: dict[Node, dict[_Channel, tuple[str, str]]] = field(
        default_factory=lambda: defaultdict(dict)
    )

    def enter(self, index: int, program: Program) -> None:
        """Add the edges of a program's step."""
        role = program.role
        read: dict[int, tuple[Operand, ...]] = {}
        known: set[tuple[str, str, DType | None]] = set()
        for operation in program.step_patterns:
            if isinstance(operation, (Copy, CollectiveOperation)):
                added = _added(operation)
                ends = operation.source.buffer, operation.target.buffer
                if (*ends, added) not in known:
                    known.add((*ends, added))
                    edge = BufferEdge((index, ends[0]), role, operation.id, added)
                    self.into[index, ends[1]].append(edge)
                if self.several and isinstance(operation, CollectiveOperation):
                    self._meets(operation, (index, ends[0]), (index, ends[1]), role)
            elif type(operation) is Compute:
                if operation.action in OF_SEGMENTS:
                    read[id(operation.operands)] = operation.operands
                else:
                    self._start(index, operation)
            elif isinstance(operation, Send):
                self.sent[operation.group, operation.size][index, operation.source.buffer] = None
            elif isinstance(operation, Receive):
                channel, target = (operation.group, operation.size), operation.target.buffer
                self.received[index, target].setdefault(channel, (role, operation.id))
        segments = self.starts[_Need(Role.PARAMETER, gathered=True)]
        for operands in read.values():
            for operand in operands:
                if operand.role is Role.PARAMETER:
                    segments[index, operand.view.buffer] = None

    def _start(self, index: int, compute: Compute) -> None:
        roles = OF_OPTIMIZER.get(compute.action, ())
        if isinstance(compute.rule, Optimizer) and compute.rule.of_loads:
            roles = (Role.PARAMETER,)  # numbers of rows are whole numbers, exact in any integer
        for operand in compute.operands if roles else ():
            if operand.role in roles:
                self.starts[_Need(operand.role, gathered=False)][index, operand.view.buffer] = None

    def _meets(self, operation: CollectiveOperation, source: Node, target: Node, role: str) -> None:
        """Record a collective: other roles contribute to it under the same id."""
        channel = (type(operation), operation.id)
        self.sent[channel][source] = None
        self.received[target].setdefault(channel, (role, operation.id))

    def edges(self, target: Node, met: set[_Channel]) -> Iterator[BufferEdge]:
        """Yield the edges into a buffer: of the same role, then from the data of other roles.

        Sources of a channel are yielded for the first buffer that receives from it; `met` has the
        channels so far. All buffers of a channel have the same sources, so further
        buffers add no edges.
        """
        yield from self.into.get(target, ())
        for channel, (role, operation) in self.received.get(target, {}).items():
            if channel not in met:
                met.add(channel)
                for source in self.sent.get(channel, ()):
                    yield BufferEdge(source, role, operation)
