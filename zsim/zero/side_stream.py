"""Segments on a side stream: shared experts during exchanges of tokens.

A side segment starts after all work of the compute stream except the exchanges issued last, with
which it overlaps (`wait_current_stream` of SharedExpertMLP before each all-to-all,
megatron/core/transformer/moe/shared_experts.py in August 2026, d98e8a64). The compute stream waits
for it before the first operation that uses one of its results (`get_output`; in backward,
gradients are added on the compute stream).

Memory that a side segment allocates belongs to its stream. A free of memory of one stream that the
other uses waits for these uses: the side stream itself, and autograd through `record_stream`.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from zsim.schedule.access import Access, accesses
from zsim.schedule.operation import (
    Allocate,
    AllToAll,
    Free,
    FreeMode,
    Operation,
    StreamOperation,
)
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.names import SIDE


class SideStream:
    """Adds the waits between both streams to operations that `writer` has written."""

    def __init__(self, writer: ScheduleWriter) -> None:
        self.writer = writer
        self._homes = set[str]()
        self._pending: list[Access] = []
        self._last = ""
        self._side_uses, self._other_uses = dict[str, str](), dict[str, str]()

    @property
    def place(self) -> int:
        """The place of the next operation."""
        return len(self.writer.operations)

    def settle(self, start: int, *, side: bool) -> None:
        """Add waits to the operations of a segment, those from `start` on."""
        operations = self.writer.operations
        fence = self._fence(operations[:start]) if side else ""
        for place in range(start, len(operations)):
            each = operations[place]
            if isinstance(each, Allocate) and side:
                self._take(each.buffer)
            elif isinstance(each, Free):
                operations[place] = self._freed(each)
            elif not isinstance(each, StreamOperation):
                continue
            elif each.stream == SIDE:
                operations[place], fence = _after(each, fence), ""
                self._note(each)
            else:
                operations[place] = self._joined(each)

    def _fence(self, before: Sequence[Operation]) -> str:
        """Return the last operation of the compute stream except exchanges."""
        return next(
            each.id
            for each in reversed(before)
            if isinstance(each, StreamOperation)
            and each.stream == COMPUTE
            and not isinstance(each, AllToAll)
        )

    def _take(self, name: str) -> None:
        """Record that memory of the side stream is allocated."""
        self._homes.add(name)
        self.writer.buffers[name] = replace(self.writer.buffers[name], home=SIDE)

    def _note(self, operation: StreamOperation) -> None:
        """Record the memory that an operation of the side stream uses."""
        self._last, found = operation.id, accesses(operation)
        self._pending += found
        self._side_uses |= {each.view.buffer: operation.id for each in found}

    def _joined(self, operation: StreamOperation) -> StreamOperation:
        """Return an operation of another stream that waits for results that it uses."""
        found = accesses(operation)
        uses = (each.view.buffer for each in found)
        self._other_uses |= {name: operation.id for name in uses if name in self._homes}
        if not any(_conflict(one, other) for one in found for other in self._pending):
            return operation
        self._pending.clear()
        self._side_uses.clear()
        return _after(operation, self._last)

    def _freed(self, free: Free) -> Free:
        """Return a free that waits for the last use by the other stream."""
        name = free.buffer
        if name in self._homes:
            self._homes.discard(name)
            uses, mode = self._other_uses.pop(name, ""), free.mode
        else:
            uses, mode = self._side_uses.pop(name, ""), FreeMode.DEFERRED
        return replace(free, uses=(*free.uses, uses), mode=mode) if uses else free


def _after(operation: StreamOperation, other: str) -> StreamOperation:
    """Return an operation that also waits for `other`, unless it is empty."""
    if not other or other in operation.after:
        return operation
    return replace(operation, after=(*operation.after, other))


def _conflict(one: Access, other: Access) -> bool:
    """Return True if two accesses share memory, and one of them writes."""
    here, there = one.view, other.view
    if here.buffer != there.buffer or not (one.writes or other.writes):
        return False
    return here.start < there.start + there.size and there.start < here.start + here.size
