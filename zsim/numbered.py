"""A program with numbers for names: what checks walk over, since comparing numbers is cheap.

Setup and the step are numbered apart. Nothing here judges: an edge to an operation that is not
issued before is set aside in `forward`.
"""

from collections.abc import Iterable, Sequence
from typing import assert_never

from zsim.access import accesses
from zsim.operation import (
    AllGather,
    Allocate,
    AllReduce,
    Branch,
    Broadcast,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    Receive,
    ReduceScatter,
    Send,
    SetScalar,
    Together,
)
from zsim.schedule import Program

HOST = -1
"""The stream of an action of the host."""


class Numbered:
    """Operations of setup or of the step, numbered in program order.

    Attributes:
        operations: both lists of a branch stand after the branch.
        index: number of an operation by its id.
        items: numbers of the operations that stand outside branches.
        sides: the two lists of a branch, by the number of the branch.
        stream: of each operation, or HOST. Streams are numbered as the schedule names them.
        position: of each operation on its stream, from 1 on; of a free that makes its home stream
            wait, the position of that wait; 0 of other actions of the host.
        length: entries on each stream.
        edges: operations of the same part, issued before, that must have finished.
        previous: ids whose previous instance must have finished, by operation; most have none.
        forward: (operation, id) of each edge to what is not issued before.
        group: the group whose communicator an operation occupies, or "".
        communications: numbers of the operations that have a group.
        buffers: what an operation reads or writes, each buffer once.
        home: the home stream of each buffer.
    """

    def __init__(
        self, program: Program, operations: Iterable[Operation], streams: Sequence[str]
    ) -> None:
        self.program = program
        self.streams = tuple(streams)
        self.operations: list[Operation] = []
        self.index: dict[str, int] = {}
        self.sides: dict[int, tuple[list[int], list[int]]] = {}
        self.stream: list[int] = []
        self.position: list[int] = []
        self.length = [0] * len(streams)
        self.edges: list[tuple[int, ...]] = []
        self.previous: dict[int, tuple[str, ...]] = {}
        self.forward: list[tuple[int, str]] = []
        self.group: list[str] = []
        self.communications: list[int] = []
        self.buffers: list[tuple[str, ...]] = []
        self._by_stream = {name: number for number, name in enumerate(streams)}
        self.home = {buffer.name: self._by_stream[buffer.home] for buffer in program.buffers}
        self.items = self._append(operations)

    def _append(self, operations: Iterable[Operation]) -> list[int]:
        items: list[int] = []
        for operation in operations:
            number = len(self.operations)
            items.append(number)
            self.operations.append(operation)
            stream = entry = HOST
            after: tuple[Edge, ...] = ()
            match operation:
                case Allocate() | SetScalar():
                    pass
                case Free(uses=uses):
                    after = uses
                    if uses and operation.mode is FreeMode.WAITED:
                        entry = self.home[operation.buffer]
                case HostWait(operation=edge):
                    after = (edge,)
                case Branch():
                    after = operation.after
                case _:
                    after = operation.after
                    stream = entry = self._by_stream[operation.stream]
            self.stream.append(stream)
            if entry >= 0:
                self.length[entry] += 1
                self.position.append(self.length[entry])
            else:
                self.position.append(0)
            self.edges.append(self._edges(number, after) if after else ())
            self.index[operation.id] = number
            self.group.append("")
            self.buffers.append(self._touched(number, operation))
            if isinstance(operation, Branch):
                self.sides[number] = (
                    self._append(operation.then),
                    self._append(operation.otherwise),
                )
        return items

    def _edges(self, number: int, after: tuple[Edge, ...]) -> tuple[int, ...]:
        """Numbers of what `after` names; what has no number yet and what is previous goes aside."""
        found: list[int] = []
        for edge in after:
            if isinstance(edge, Previous):
                self.previous[number] = (*self.previous.get(number, ()), edge.operation)
            elif edge in self.index:
                found.append(self.index[edge])
            else:
                self.forward.append((number, edge))
        return tuple(found)

    def _touched(self, number: int, operation: Operation) -> tuple[str, ...]:
        match operation:
            case Allocate() | Free() | HostWait() | SetScalar():
                return ()
            case Compute(operands=operands):
                if len(operands) == 1:
                    return (operands[0].view.buffer,)
                return tuple({operand.view.buffer: None for operand in operands})
            case Copy(source=source, target=target):
                pass
            case (
                AllGather(source=source, target=target)
                | ReduceScatter(source=source, target=target)
                | AllReduce(source=source, target=target)
                | Broadcast(source=source, target=target)
            ):
                self.group[number] = operation.group
                self.communications.append(number)
            case Fill(target=view) | Branch(value=view):
                return (view.buffer,)
            case Send() | Receive() | Together():
                self.group[number] = operation.group
                self.communications.append(number)
                return tuple({access.view.buffer: None for access in accesses(operation)})
            case _:
                assert_never(operation)
        one, other = source.buffer, target.buffer
        return (one,) if one == other else (one, other)
