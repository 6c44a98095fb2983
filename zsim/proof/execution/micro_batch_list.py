"""Signature of the operations of a micro-batch on a rank, and the buffers that they touch.

Buffers that a micro-batch allocates and frees itself are numbered in order of allocation, so that
the signature does not depend on which buffers it uses.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

from msgspec import Struct

from zsim.proof.execution.lone_micro_batch import ACTIONS
from zsim.proof.execution.repetition import UNUSED, IrregularError
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Compute,
    Copy,
    Free,
    HostWait,
    Operand,
    Operation,
    SetScalar,
    View,
)
from zsim.schedule.schedule import Buffer, Program

NAMED_APART: dict[Hashable, frozenset[str]] = {
    Buffer: frozenset({"name", "home", "produced", "course"}),
    View: frozenset({"buffer"}),
    Operand: frozenset({"view"}),
    Compute: UNUSED | {"micro_batch", "operands"},
}
"""Fields that are not part of signatures; for other operations they are UNUSED."""

Names = tuple[frozenset[str], frozenset[str]]
"""Buffers that an operation reads, and buffers that it writes or adds to."""


@dataclass(slots=True)
class MicroBatchList:
    """Operations of a micro-batch in the step of one role, as far as values depend on them.

    Attributes:
        signature: the signature. It is equal for lists that differ only in their own buffers, or in
            the time of frees: own buffers are touched only while they are allocated.
        own: buffers that the micro-batch allocates and frees.
        read: other buffers from which it reads.
        adds: copies that add to other buffers.
        changed: other buffers that it writes, allocates or frees.
    """

    signature: tuple[Hashable, ...] = ()
    own: set[str] = field(default_factory=set[str])
    read: set[str] = field(default_factory=set[str])
    adds: list[Copy] = field(default_factory=list[Copy])
    changed: set[str] = field(default_factory=set[str])

    @property
    def added(self) -> set[str]:
        """The buffers to which it adds."""
        return {each.target.buffer for each in self.adds}

    @property
    def foreign(self) -> set[str]:
        """The buffers that it touches without having allocated them."""
        return self.read | self.added | self.changed


def identity(operations: Iterable[Operation], micro_batch: int) -> tuple[Hashable, ...]:
    """Return a key that is equal for lists that touch the same views in the same manner.

    Raises:
        IrregularError: there is a branch, a host scalar changes, or an action for one micro-batch
            names another one.
    """
    found: list[Hashable] = []
    for operation in operations:
        kind: Any = type(operation)  # narrowing types here would double the cost
        each: Any = operation
        if kind is Allocate or kind is Free:
            found += (kind, each.buffer)
        elif kind is Copy:
            found += (kind, id(each.source), id(each.target))
            found += (each.accumulate, each.divisor, each.by_parameter)
        elif kind is Compute:
            found += (kind, id(each.operands), id(each.action), each.unit, each.segment)
            found += (each.scalars, each.rule)
            if each.micro_batch != micro_batch and each.action in ACTIONS:
                raise IrregularError
        elif kind is Branch or kind is SetScalar:
            raise IrregularError
        elif kind is not HostWait:
            values = _values(each)
            found += (kind, *[id(value) if type(value) is View else value for value in values])
    return tuple(found)


def _values(each: object) -> list[Any]:
    """Return the values of the fields that count in an operation, or a part of one."""
    kind: Any = type(each)
    return [getattr(each, name) for name in counted_fields(kind)]


@cache
def counted_fields(kind: Hashable) -> tuple[str, ...]:
    """Return the fields of an operation, or a part of one, that are part of its signature."""
    left_out = NAMED_APART.get(kind, UNUSED)
    names = cast("type[Struct]", kind).__struct_fields__
    return tuple(name for name in names if name not in left_out)


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

    def read(self, operations: Iterable[Operation]) -> MicroBatchList:
        """Return the signature of a micro-batch's operations, and the buffers they touch."""
        numbers, alive, found = self._numbers, self._alive, MicroBatchList()
        numbers.clear()
        alive.clear()
        signature: list[Hashable] = []
        freed: list[int] = []
        for operation in operations:
            if type(operation) is Allocate:
                name = operation.buffer
                alive.add(name)
                signature += (Allocate, numbers.setdefault(name, len(numbers)), self._buffer(name))
            elif type(operation) is Free:
                name = operation.buffer
                if name in alive:
                    alive.remove(name)
                    freed.append(numbers[name])
                else:
                    signature += (Free, numbers.get(name, name))
                    found.changed.add(name)
            elif type(operation) is not HostWait:
                self._touch(operation, found)
                if type(operation) is Compute:
                    signature += self._computed(operation)
                else:
                    signature += self._moved(operation)
        found.signature = (*signature, Free, *sorted(freed))
        found.changed |= alive  # allocated and not freed
        found.own = numbers.keys() - alive
        return found

    def _kind(self, signature: Hashable) -> int:
        """Return a number for a part of a signature, which is cheaper to hash."""
        return self._kinds.setdefault(signature, len(self._kinds))

    def _buffer(self, name: str) -> int:
        """Return a number that is equal for buffers that differ only in their names."""
        found = self._buffers.get(name)
        if found is None:
            own = self._by_name[name]
            found = self._buffers[name] = self._kind((Buffer, *_values(own)))
        return found

    def _touch(self, operation: Operation, found: MicroBatchList) -> None:
        """Record the effects of an operation on buffers that the micro-batch has not allocated."""
        read, written = self.names(operation)
        alive = self._alive
        if not read <= alive:
            found.read |= read - alive
        if not written <= alive:
            if type(operation) is Copy and operation.accumulate:
                found.adds.append(operation)
            else:
                found.changed |= written - alive

    def names(self, operation: Operation) -> Names:
        """Return the buffers that an operation touches; the target of a sum counts as written."""
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

    def _computed(self, compute: Compute) -> list[Hashable]:
        """Return the signature of a computation."""
        what = self._kind((Compute, *_values(compute)))
        signature: list[Hashable] = [Compute, what, len(compute.operands)]
        number_of, known = self._numbers.get, self._operands
        for operand in compute.operands:
            own = known.get(id(operand))
            if own is None:
                kind = self._kind((Operand, *_values(operand), *_values(operand.view)))
                own = known[id(operand)] = operand.view.buffer, kind
            name, kind = own
            signature += (number_of(name, name), kind)
        return signature

    def _moved(self, operation: Operation) -> list[Hashable]:
        """Return the signature of any other operation that touches buffers."""
        kind: Any = type(operation)
        signature: list[Hashable] = [kind]
        for value in _values(operation):
            if type(value) is View:
                name = value.buffer
                signature += (self._numbers.get(name, name), tuple(_values(value)))
            else:
                signature.append(value)
        return signature
