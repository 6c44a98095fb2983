"""What the operations of one micro-batch say and touch on a rank, whichever memory it has.

Buffers that a micro-batch takes and gives back itself are numbered in the order in which it takes
them: what it says is the same in another slot of buffers.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, cast

from zsim.proof.execution.repetition import UNUSED, IrregularError
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    OF_SEGMENTS,
    Action,
    Allocate,
    Branch,
    Compute,
    Copy,
    Free,
    HostWait,
    Operation,
    SetScalar,
    View,
)
from zsim.schedule.schedule import Program

ACTIONS = frozenset({*OF_SEGMENTS, Action.LOAD})
"""What is computed for one micro-batch alone."""

Names = tuple[frozenset[str], frozenset[str]]
"""Buffers that an operation reads, and those that it writes or adds to."""


@dataclass(slots=True)
class MicroBatchList:
    """Operations of a micro-batch in the step of one role, as values see them.

    Attributes:
        said: what they say; equal where they differ in slots of buffers alone.
        own: buffers that the micro-batch takes, and gives back.
        read: others, of which it reads.
        added: others that its copies add to.
        changed: others that it writes, takes or gives back.
        is_plain: whether all that it computes are segments of its own.
    """

    said: tuple[Hashable, ...] = ()
    own: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])
    added: set[str] = field(default_factory=set[str])
    changed: set[str] = field(default_factory=set[str])
    is_plain: bool = True

    @property
    def foreign(self) -> set[str]:
        """Return what it touches while it has not taken it."""
        return self.read | self.added | self.changed


def identity(operations: Iterable[Operation], micro_batch: int) -> tuple[Hashable, ...]:
    """Return what lists have in common that touch the very same views in the same way.

    Raises:
        IrregularError: there is a branch, or a number of the host changes.
    """
    found: list[Hashable] = []
    for operation in operations:
        kind: Any = type(operation)  # to be told one by one costs as much as what is done
        each: Any = operation
        if kind is Allocate or kind is Free:
            found += (kind, each.buffer)
        elif kind is Copy:
            found += (kind, id(each.source), id(each.target))
            found += (each.accumulate, each.divisor, each.by_parameter)
        elif kind is Compute:
            found += (kind, id(each.operands), id(each.action), each.unit, each.segment)
            found += (each.micro_batch == micro_batch, each.scalars, each.rule)
        elif kind is Branch or kind is SetScalar:
            raise IrregularError
        elif kind is not HostWait:
            values = [getattr(each, name) for name in _fields(kind)]
            found += (kind, *[id(value) if type(value) is View else value for value in values])
    return tuple(found)


@cache
def _fields(kind: Hashable) -> tuple[str, ...]:
    found = fields(cast("type[Copy]", kind))  # or any other operation
    return tuple(each.name for each in found if each.init and each.name not in UNUSED)


class ListReader:
    """Reads lists of the micro-batches of one program."""

    def __init__(self, program: Program) -> None:
        self._by_name = program.by_name
        self._kinds: dict[Hashable, int] = {}
        self._buffers: dict[str, int] = {}
        self._operands: dict[int, tuple[str, int]] = {}
        self._names: dict[tuple[int, int], Names] = {}
        self._numbers: dict[str, int] = {}
        self._alive: set[str] = set()

    def read(self, operations: Iterable[Operation], micro_batch: int) -> MicroBatchList:
        """Return what the list of a micro-batch says and touches."""
        numbers, alive, found = self._numbers, self._alive, MicroBatchList()
        numbers.clear()
        alive.clear()
        said: list[Hashable] = []
        for operation in operations:
            if type(operation) is Allocate:
                name = operation.buffer
                alive.add(name)
                said += (Allocate, numbers.setdefault(name, len(numbers)), self._buffer(name))
            elif type(operation) is Free:
                name = operation.buffer
                said += (Free, numbers.get(name, name))
                if name in alive:
                    alive.remove(name)
                else:
                    found.changed.add(name)
            elif type(operation) is not HostWait:
                self._touch(operation, found)
                if type(operation) is Compute:
                    said += self._computed(operation, micro_batch, found)
                else:
                    said += self._moved(operation)
        found.said = tuple(said)
        found.changed |= alive  # taken, and not given back
        found.own = numbers.keys() - alive
        return found

    def _kind(self, said: Hashable) -> int:
        """Return a number for what is said: to hash it costs less."""
        return self._kinds.setdefault(said, len(self._kinds))

    def _buffer(self, name: str) -> int:
        """Return what buffers have in common that differ in their name alone."""
        found = self._buffers.get(name)
        if found is None:
            own = self._by_name[name]
            said = (own.pool, own.elements, own.dtype, own.kind, own.layout, own.shard)
            found = self._buffers[name] = self._kind(said)
        return found

    def _touch(self, operation: Operation, found: MicroBatchList) -> None:
        """Note what an operation does to buffers that the micro-batch has not taken."""
        read, written = self.names(operation)
        alive = self._alive
        if not read <= alive:
            found.read |= read - alive
        if not written <= alive:
            adds = type(operation) is Copy and operation.accumulate and read.isdisjoint(written)
            (found.added if adds else found.changed).update(written - alive)

    def names(self, operation: Operation) -> Names:
        """Return the buffers that an operation touches; what a copy adds to counts as written."""
        if type(operation) is Copy:
            return frozenset((operation.source.buffer,)), frozenset((operation.target.buffer,))
        key = (0, 0)
        if type(operation) is Compute:
            key = id(operation.operands), id(operation.action)
            known = self._names.get(key)
            if known is not None:
                return known
        touched = accesses(operation)
        found = (
            frozenset([view.buffer for view, reads, _ in touched if reads]),
            frozenset([view.buffer for view, _, writes in touched if writes]),
        )
        if key != (0, 0):
            self._names[key] = found
        return found

    def _computed(
        self, compute: Compute, micro_batch: int, found: MicroBatchList
    ) -> list[Hashable]:
        """Return what a computation says."""
        is_own = compute.micro_batch == micro_batch
        is_alone = is_own and not compute.scalars and compute.rule is None
        found.is_plain &= is_alone and compute.action in ACTIONS
        what = (compute.action, compute.unit, compute.segment, compute.scalars, compute.rule)
        said: list[Hashable] = [Compute, self._kind((is_own, *what)), len(compute.operands)]
        number_of, known = self._numbers.get, self._operands
        for operand in compute.operands:
            own = known.get(id(operand))
            if own is None:
                view = operand.view
                place = (view.start, view.size, view.axis, view.layout, view.origin)
                kind = self._kind((operand.role, operand.partial, *place))
                own = known[id(operand)] = view.buffer, kind
            name, kind = own
            said += (number_of(name, name), kind)
        return said

    def _moved(self, operation: Operation) -> list[Hashable]:
        """Return what anything else says that touches buffers."""
        kind: Any = type(operation)
        said: list[Hashable] = [kind]
        for value in [getattr(operation, name) for name in _fields(kind)]:
            if type(value) is View:
                place = (value.start, value.size, value.axis, value.layout, value.origin)
                said += (self._numbers.get(value.buffer, value.buffer), place)
            else:
                said.append(value)
        return said
