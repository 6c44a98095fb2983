"""Model a schedule on Gloo, where the host blocks wherever a CUDA stream would wait."""

from collections.abc import Iterable

from zsim.proof import progress
from zsim.proof.context import Context
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    HostWait,
    Operation,
    SetScalar,
    StreamOperation,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule


def refusal(schedule: Schedule) -> str | None:
    """Return why `schedule` could hang on Gloo, or None.

    Gloo has no streams, so the host blocks before each operation that is ordered after others. A
    schedule that makes progress on streams may then block on an operation that the host has not
    issued yet.
    """
    waiting = replace(
        schedule, programs=tuple(_blocking(schedule, program) for program in schedule.programs)
    )
    for finding in progress.examine(Context.of(waiting, None)):
        return f"{finding.operation}: hangs on Gloo, where the host waits: {finding.why}"
    return None


def _blocking(schedule: Schedule, program: Program) -> Program:
    return replace(
        program,
        setup=tuple(_Blocking(schedule, program).write(program.setup)),
        step=tuple(_Blocking(schedule, program).write(program.step)),
    )


class _Blocking:
    """Rewrite operations with a host wait wherever `CpuStreams` blocks."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.schedule = schedule
        self.program = program
        self.flying: dict[str, StreamOperation] = {}
        self.ids = set(program.by_id)
        self.count = 0

    def write(self, operations: Iterable[Operation]) -> list[Operation]:
        """Write the operations with their waits; at the end, wait for all operations in flight."""
        written = self._write(operations)
        written += self._waits(list(self.flying))
        return written

    def _write(self, operations: Iterable[Operation]) -> list[Operation]:
        written: list[Operation] = []
        for operation in operations:
            match operation:
                case Allocate() | HostWait() | SetScalar():
                    written.append(operation)
                case Free(uses=uses):
                    home = self.program.by_name[operation.buffer].home
                    touching = [
                        name
                        for name, other in self.flying.items()
                        if other.stream == home and self._touches(other, operation.buffer)
                    ]
                    written += [*self._waits([*uses, *touching]), operation]
                case Branch(then=then, otherwise=otherwise):
                    before = dict(self.flying)
                    first = tuple(self._write(then))
                    after_first, self.flying = self.flying, before
                    second = tuple(self._write(otherwise))
                    self.flying = {**after_first, **self.flying}
                    written.append(replace(operation, then=first, otherwise=second))
                case Compute() | Fill() | Copy():
                    written += [*self._waits([*operation.after, *self._on(operation.stream)])]
                    written.append(operation)
                case _:
                    written += [*self._waits(self._conflicting(operation)), operation]
                    self.flying[operation.id] = operation
        return written

    def _waits(self, edges: Iterable[Edge]) -> list[Operation]:
        waits: list[Operation] = []
        for edge in dict.fromkeys(edges):
            if isinstance(edge, str) and edge in self.flying:
                self.count += 1
                name = f"{edge}/wait{self.count}"
                assert name not in self.ids
                waits.append(HostWait(id=name, operation=edge))
                del self.flying[edge]
        return waits

    def _on(self, stream: str) -> list[str]:
        return [name for name, operation in self.flying.items() if operation.stream == stream]

    def _touches(self, operation: StreamOperation, buffer: str) -> bool:
        return any(access.view.buffer == buffer for access in accesses(operation))

    def _conflicting(self, operation: StreamOperation) -> list[str]:
        """Return in-flight collectives ordered before `operation` that conflict on its buffers."""
        streams = {operation.stream}
        streams |= {
            self.flying[edge].stream
            for edge in operation.after
            if isinstance(edge, str) and edge in self.flying
        }
        buffers = {access.view.buffer for access in accesses(operation)}
        return [
            name
            for name, other in self.flying.items()
            if other.stream in streams
            and any(self._touches(other, buffer) for buffer in buffers)
            and any(
                access.writes
                for access in (*accesses(operation), *accesses(other))
                if access.view.buffer in buffers
            )
        ]
