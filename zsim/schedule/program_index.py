"""A program with numbers in place of names, for checks: numbers are cheap to compare.

Setup and the step are numbered separately. Nothing is checked here: edges to operations that are
not issued before are collected in `forward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, assert_never, cast

from zsim.schedule.access import COMPUTE_ACCESS, accesses
from zsim.schedule.operation import (
    Action,
    Allocate,
    Branch,
    CollectiveOperation,
    Communication,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    Read,
    ReadCounts,
    SetScalar,
    StreamOperation,
    Together,
    View,
    Write,
    walk,
)
from zsim.schedule.schedule import Program

HOST = -1
"""The stream of an action of the host."""

ALLOCATE, FREE, READ, WRITE, WHOLE, UPDATE = b"AFrwWu"
"""Effects of operations on buffers. WHOLE writes every element, UPDATE reads and writes."""

ACTIONS = frozenset({HostWait, ReadCounts, SetScalar, Branch})
"""Actions of the host other than allocations and frees."""

MOVES = frozenset({Copy, Read, Write, Fill})
"""Operations that move elements within one rank."""

HostAction = HostWait | ReadCounts | SetScalar | Branch
"""One of the operations in `ACTIONS`."""

Movement = Copy | Fill | Communication | Together
"""Operations that move elements, within one rank or between ranks."""

Touched = tuple[tuple[str, int], ...]
"""Effect of an operation on each buffer that it touches."""

_CODES = {
    action: {
        role: UPDATE if reads and writes else WRITE if writes else READ
        for role, (reads, writes) in table.items()
    }
    for action, table in COMPUTE_ACCESS.items()
}


def _both(one: int, other: int) -> int:
    """Return the combined effect of two views of one buffer."""
    if one == other:
        return one
    return UPDATE if READ in (one, other) or UPDATE in (one, other) else WHOLE


@dataclass(slots=True)
class History:
    """Accesses to one buffer, in program order: the number of each operation, and its effect.

    `away` is True if some operation touches the buffer on a stream other than its home.
    """

    home: int
    numbers: list[int]
    codes: bytearray
    away: bool = False


class Numbered:
    """Operations of setup or of the step, numbered in program order.

    Attributes:
        operations: all operations; both lists of a branch follow it.
        index: number of an operation of a stream by its id.
        items: numbers of the operations outside branches.
        sides: the two lists of a branch, by the number of the branch.
        stream: of each operation, or HOST. Streams are numbered in the order of the schedule.
        position: of each operation on its stream, from 1 on; of a free that makes its home stream
            wait, the position of that wait; 0 of other actions of the host.
        entries: numbers of the entries of each stream, in the order of their positions.
        edges: operations of the same part, issued before, that must have finished.
        previous: ids whose previous instance must have finished, by operation; most have none.
        forward: (operation, id) of each edge to an operation that is not issued before.
        group: the group whose communicator an operation occupies, or "".
        communications: numbers of the operations that have a group.
        history: effects on each buffer that an operation names.
        memory: numbers of the allocations and frees.
        computes: numbers of the `Compute` operations.
        updates: numbers of the optimizer's updates.
        defers: whether some free is deferred.
        doubled: operations that touch one buffer through several views and write one of them.
        home: the home stream of each buffer.
    """

    def __init__(
        self, program: Program, operations: Sequence[Operation], streams: Sequence[str]
    ) -> None:
        self.program = program
        self.streams = tuple(streams)
        self.operations: list[Operation] = list(walk(operations))
        count = len(self.operations)
        self.index: dict[Edge, int] = {}
        self.sides: dict[int, tuple[list[int], list[int]]] = {}
        # Values of most actions of the host; other operations overwrite them.
        self.stream: list[int] = [HOST] * count
        self.position: list[int] = [0] * count
        self.entries: list[list[int]] = [[] for _ in streams]
        self.edges: list[tuple[int, ...]] = [()] * count
        self.previous: dict[int, tuple[str, ...]] = {}
        self.forward: list[tuple[int, str]] = []
        self.group: list[str] = [""] * count
        self.communications: list[int] = []
        self.history: dict[str, History] = {}
        self.memory: list[int] = []
        self.computes: list[int] = []
        self.updates: list[int] = []
        self.defers = False
        self.doubled: list[int] = []
        self._by_stream = {name: number for number, name in enumerate(streams)}
        self.home = {buffer.name: self._by_stream[buffer.home] for buffer in program.buffers}
        self._elements = {buffer.name: buffer.elements for buffer in program.buffers}
        self._seen: dict[int, tuple[Compute, Touched]] = {}
        self._next = 0
        self.items = self._number(operations)

    @property
    def length(self) -> list[int]:
        """Number of entries on each stream."""
        return [len(entries) for entries in self.entries]

    def _number(self, operations: Sequence[Operation]) -> list[int]:
        """Assign numbers to a list of operations; return them without those inside branches.

        The most frequent kinds are tested first, with one test each, since every proof runs this
        loop.
        """
        items: list[int] = []
        histories, memory = self.history, self.memory
        number = self._next
        for operation in cast("Sequence[Any]", operations):  # a cast per operation would be slow
            items.append(number)
            if type(operation) is Allocate:  # if False, three times as fast as isinstance
                history = histories.get(operation.buffer) or self._of(operation.buffer)
                history.numbers.append(number)
                history.codes.append(ALLOCATE)
                memory.append(number)
            elif type(operation) is Free:
                history = histories.get(operation.buffer) or self._of(operation.buffer)
                history.numbers.append(number)
                history.codes.append(FREE)
                memory.append(number)
                if operation.uses:
                    self._free(number, operation)
            elif type(operation) in ACTIONS:
                self.edges[number] = self._act(number, operation)
                if type(operation) is Branch:
                    self._next = number + 1
                    sides = self._number(operation.then), self._number(operation.otherwise)
                    self.sides[number] = sides
                    number = self._next - 1
            else:
                stream = self._run(number, operation)
                if type(operation) is Compute:
                    self._compute(number, stream, operation)
                else:
                    if type(operation) not in MOVES:
                        self.group[number] = operation.group
                        self.communications.append(number)
                    self._move(number, stream, operation)
            number += 1
        self._next = number
        return items

    def _free(self, number: int, free: Free) -> None:
        """Record the operations for which a free waits."""
        self.edges[number] = self._edges(number, free.uses)
        if free.mode is FreeMode.WAITED:
            self.position[number] = self._enter(self.home[free.buffer], number)
        elif free.mode is FreeMode.DEFERRED:
            self.defers = True

    def _act(self, number: int, operation: HostAction) -> tuple[int, ...]:
        """Return the numbers of the operations for which an action of the host waits."""
        match operation:
            case ReadCounts(operation=edge, source=source):
                self._read_by_host(number, source)
                return self._edges(number, (edge,))
            case HostWait(operation=edge):
                return self._edges(number, (edge,))
            case SetScalar():
                return ()
            case Branch(value=value):
                if value is not None:
                    self._read_by_host(number, value)
                return self._edges(number, operation.after)
            case _:
                assert_never(operation)

    def _read_by_host(self, number: int, view: View) -> None:
        """Record that the host reads a view."""
        history = self._of(view.buffer)
        history.numbers.append(number)
        history.codes.append(READ)
        history.away = True

    def _run(self, number: int, operation: StreamOperation) -> int:
        """Record the position and the edges of an operation on a stream; return the stream."""
        stream = self.stream[number] = self._by_stream[operation.stream]
        entries = self.entries[stream]
        entries.append(number)
        self.position[number] = len(entries)
        if operation.after:
            self.edges[number] = self._edges(number, operation.after)
        self.index[operation.id] = number
        return stream

    def _compute(self, number: int, stream: int, operation: Compute) -> None:
        """Record the effects of a `Compute` on its buffers."""
        self.computes.append(number)
        if operation.action is Action.UPDATE:
            self.updates.append(number)
        for buffer, code in self._computes(number, operation):
            self._touch(number, stream, buffer, code)

    def _touch(self, number: int, stream: int, buffer: str, code: int) -> None:
        """Record the effect of an operation on a buffer."""
        history = self.history.get(buffer) or self._of(buffer)
        history.numbers.append(number)
        history.codes.append(code)
        if stream != history.home:
            history.away = True

    def _of(self, buffer: str) -> "History":
        """Return the history of `buffer`."""
        history = self.history.get(buffer)
        if history is None:
            history = self.history[buffer] = History(self.home[buffer], [], bytearray())
        return history

    def _enter(self, stream: int, number: int) -> int:
        """Return the position of a new entry of `stream`."""
        entries = self.entries[stream]
        entries.append(number)
        return len(entries)

    def _edges(self, number: int, after: tuple[Edge, ...]) -> tuple[int, ...]:
        """Return the numbers of `after`; put unnumbered edges in `forward`, older in `previous`."""
        index = self.index
        if len(after) == 1 and (only := index.get(after[0])) is not None:  # most have one
            return (only,)
        found: list[int] = []
        for edge in after:
            if isinstance(edge, Previous):
                self.previous[number] = (*self.previous.get(number, ()), edge.operation)
            elif edge in index:
                found.append(index[edge])
            else:
                self.forward.append((number, edge))
        return tuple(found)

    def _code(self, view: View) -> int:
        """Return the effect on its buffer of a write to `view`."""
        whole = view.size == self._elements[view.buffer] and view.axis is view.layout is None
        return WHOLE if whole else WRITE

    def _computes(self, number: int, compute: Compute) -> Touched:
        """Return the effects of a `Compute` on each buffer; cached for operands that recur."""
        operands = compute.operands
        seen = self._seen.get(id(operands))
        if seen is not None and seen[0].action is compute.action:
            return seen[1]
        codes = _CODES[compute.action]
        found: dict[str, int] = {}
        doubled = False
        for operand in operands:
            view = operand.view
            code = codes[operand.role]
            if code == WRITE:
                code = self._code(view)
            before = found.get(view.buffer)
            if before is None:
                found[view.buffer] = code
            else:
                if before != code:
                    found[view.buffer] = _both(before, code)
                doubled |= before != READ or code != READ
        if doubled:
            self.doubled.append(number)
            self._fill_up(compute, found)
        made = tuple(found.items())
        self._seen[id(operands)] = (compute, made)
        return made

    def _fill_up(self, compute: Compute, found: dict[str, int]) -> None:
        """Count views that are written together as the whole buffer if they fill it."""
        written: dict[str, int] = {}
        for operand in compute.operands:
            view = operand.view
            if found[view.buffer] == WRITE and view.axis is view.layout is None:
                written[view.buffer] = written.get(view.buffer, 0) + view.size
        for buffer, size in written.items():
            if size == self._elements[buffer]:
                found[buffer] = WHOLE

    def _move(self, number: int, stream: int, operation: Movement) -> None:
        """Record the effects of a copy, a fill or a communication on its buffers."""
        match operation:
            case Copy() | CollectiveOperation():
                source, target = operation.source.buffer, operation.target.buffer
                if source == target:
                    self.doubled.append(number)
                    self._touch(number, stream, source, UPDATE)
                    return
                adds = type(operation) is Copy and operation.accumulate
                code = UPDATE if adds else self._code(operation.target)
                self._touch(number, stream, source, READ)
                self._touch(number, stream, target, code)
            case Fill(target=written) | Communication(writes=View() as written):
                self._touch(number, stream, written.buffer, self._code(written))
            case Communication(reads=View() as read):
                self._touch(number, stream, read.buffer, READ)
            case Communication():
                pass
            case Together():
                for buffer, code in self._together(number, operation):
                    self._touch(number, stream, buffer, code)
            case _:
                assert_never(operation)

    def _together(self, number: int, together: Together) -> Touched:
        found: dict[str, int] = {}
        for view, reads, _ in accesses(together):
            code = READ if reads else self._code(view)
            before = found.setdefault(view.buffer, code)
            found[view.buffer] = _both(before, code)
        self.doubled.append(number)
        return tuple(found.items())
