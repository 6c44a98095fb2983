"""Run the program of one rank: issue every operation of a schedule in host order."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, assert_never

import torch

from zsim.schedule.access import accesses
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import (
    Allocate,
    AllToAll,
    Branch,
    Communication,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    FreeMode,
    HostWait,
    Operation,
    ReadCounts,
    SetScalar,
    StreamOperation,
    Together,
    View,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import LedgerEntry
from zsim_torch.execute.collectives import IssuedCollective, ProcessGroups
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.copying import Copier
from zsim_torch.execute.first_nan import FirstNan
from zsim_torch.execute.flights import BufferAccess, PendingWork, StreamEntry
from zsim_torch.execute.host_workers import Awaitable, worker_streams
from zsim_torch.execute.issue_lines import IssueLines
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.memory_part import Remains
from zsim_torch.execute.needed_waits import NeededWaits
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_ledger import SETUP, RankLedger
from zsim_torch.execute.read_counts import CountedRows
from zsim_torch.execute.streams import Completion, Streams
from zsim_torch.supervise.progress_record import noting


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMachine:
    """The components that an executor of one rank works with."""

    schedule: Schedule
    program: Program
    coordinates: Coordinates
    memory: LiveMemory
    streams: Streams
    communicators: ProcessGroups
    computer: Computer
    poison: Poison


class _Deferred(NamedTuple):
    """A freed buffer that operations in flight still use."""

    buffer: str
    remains: Remains
    finish: Completion


@dataclass(slots=True)
class Executor:
    """One rank's host: issues operations, records allocations and the list of transfers.

    Work that does not change from step to step is done once: an operation is bound to a function
    when it is first issued. Every operation is a separate call, so that no local variable keeps
    memory alive after it. `on_issue` is called with the step and id of each operation before it is
    issued, and with an empty id at the end of a step. Without `keeps_trace`, only the current step
    is recorded, and there are no events; without `keeps_ledger`, no allocations are recorded.
    """

    machine: RankMachine
    scalars: dict[str, float]
    on_issue: Callable[[int, str], None] | None = None
    keeps_trace: bool = True
    keeps_ledger: bool = True
    step: int = SETUP
    operation: str = ""
    _lines: IssueLines = field(default_factory=IssueLines)
    _waits: NeededWaits = field(init=False)
    _awaited: set[str] = field(init=False)
    _deferred: list[_Deferred] = field(default_factory=list[_Deferred])
    _travelled: set[str] = field(default_factory=set[str])
    _row_bytes: dict[str, int] = field(default_factory=dict[str, int])
    ledger: RankLedger = field(init=False)
    counted: CountedRows = field(init=False)
    first_nan: FirstNan = field(init=False)
    _copier: Copier = field(init=False)
    _role: str = field(init=False)

    def __post_init__(self) -> None:
        program = self.machine.program
        self.ledger = RankLedger(program, self.machine.communicators)
        machine = self.machine
        self.counted = CountedRows(machine.schedule, program, machine.coordinates)
        self.first_nan = FirstNan(self.machine.memory)
        self._copier = Copier(self.machine.memory)
        several = len(self.machine.schedule.programs) > 1
        self._role = f" of {self.machine.program.role}" if several else ""
        homes = {buffer.name: buffer.home for buffer in program.buffers}
        threads = worker_streams(self.machine.schedule, program)
        self._waits = NeededWaits.of(program.step, homes, threads)
        self._awaited = self._waits.awaited

    def run_setup(self) -> None:
        """Run setup, then drain every stream of this rank."""
        self._begin(SETUP)
        self._run(self.machine.program.setup)
        self.machine.streams.drain()
        self._end_step()

    def run_again(self, operations: Iterable[Operation]) -> None:
        """Run operations of setup once more, then drain every stream."""
        self._begin(SETUP)
        self._run(operations)
        self.machine.streams.drain()
        self._end_step()

    def run_step(self, step: int, given: Mapping[str, float]) -> None:
        """Issue step number `step`, with the caller's values of host scalars in `given`."""
        if not self.keeps_trace:
            self._forget()
        self._begin(step)
        self.counted.begin_step()
        self.scalars |= given
        self._run(self.machine.program.step)
        self._end_step()

    def _begin(self, step: int) -> None:
        streams = self.machine.streams
        self.step = streams.step = step
        streams.keeps_trace = self.keeps_trace

    def _end_step(self) -> None:
        self.machine.streams.end_step()
        if self.on_issue is not None:
            self.on_issue(self.step, "")
        self.ledger.end_step(self.step)

    def _forget(self) -> None:
        """Drop the records of the last step, so that memory does not grow with the steps."""
        self.ledger.forget()
        self.counted.forget()
        self.machine.streams.forget()

    def _run(self, operations: Iterable[Operation]) -> None:
        where = self._role if self.step == SETUP else f" in step {self.step}{self._role}"
        step, write, on_issue = where.encode(), noting(), self.on_issue
        for each in self._lines.of(operations):
            if each.line and write is not None:
                write(each.line + step)
            if on_issue is not None:
                on_issue(self.step, each.name)
            self.operation = each.name
            issue = each.issue
            if issue is None:
                issue = each.issue = self._bound(each.operation)
            issue()

    def _bound(self, operation: Operation) -> Callable[[], None]:
        """Return a function that issues the operation in any step."""
        match operation:
            case Allocate(buffer=buffer) if buffer in self.machine.memory.routed:
                return partial(self._allocate_rows, operation)
            case Allocate(buffer=buffer):
                line = self.ledger.entry(operation.id, buffer, 1)
                if self.machine.program.by_name[buffer].produced:
                    return partial(self._allocate, self.machine.memory.promise, buffer, line)
                return partial(self._allocate, self.machine.memory.allocate, buffer, line)
            case Free(buffer=buffer) if buffer in self.machine.memory.routed:
                return partial(self._free_rows, operation)
            case Free():
                return self._bound_free(operation)
            case ReadCounts(operation=edge) if self.machine.memory.routed:
                return partial(self._read_counts, operation, self._needed(operation, (edge,)))
            case HostWait(operation=edge) | ReadCounts(operation=edge):
                return partial(self.machine.streams.host_waits, self._needed(operation, (edge,)))
            case SetScalar():
                return partial(self._set_scalar, operation)
            case Branch(after=after):
                return partial(self._branch, operation, self._needed(operation, after))
            case Compute() | Fill() | Copy():
                return self._bound_compute(operation)
            case Communication():
                return self._bound_collective(operation, (operation,))
            case Together(members=members):
                return self._bound_collective(operation, members)
            case _:
                assert_never(operation)

    def _needed(self, operation: Operation, edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
        """Return the edges that still order something; for setup, which runs once, all edges."""
        return self._waits.edges.get(operation.id, edges)

    def _allocate(self, allocate: Callable[[str], None], buffer: str, line: LedgerEntry) -> None:
        if self._deferred:
            self._return_deferred(line.operation)
        allocate(buffer)
        if self.keeps_ledger:
            self.ledger.enter(self.step, line)

    def _allocate_rows(self, allocate: Allocate) -> None:
        """Allocate a buffer with counted rows, at most in its declared size."""
        buffer, memory = allocate.buffer, self.machine.memory
        booked = self.machine.program.by_name[buffer]
        self.counted.begin(buffer, allocate.micro_batch)
        elements = self.counted.elements(buffer)
        elements = booked.elements if elements is None else elements
        memory.resize(buffer, elements)
        size_bytes = self._row_bytes[buffer] = elements * booked.dtype.size_bytes
        line = self.ledger.entry(allocate.id, buffer, 1, size_bytes)
        self._allocate(memory.promise if booked.produced else memory.allocate, buffer, line)

    def _free_rows(self, free: Free) -> None:
        line = self.ledger.entry(free.id, free.buffer, -1, self._row_bytes.pop(free.buffer))
        home = self.machine.program.by_name[free.buffer].home
        self._free(home, free, self._needed(free, free.uses), line)

    def _read_counts(self, read: ReadCounts, edges: tuple[Edge, ...]) -> None:
        """Wait for the counts of rows, and pass them on."""
        self.machine.streams.host_waits(edges)
        values = self.machine.memory.flat(read.source)
        handle = self.machine.computer.row_handle(read.layer)
        sent = None if handle is None else handle.sent(read.micro_batch)
        found = self.counted.read(read, values, sent, self.step)
        if handle is not None:
            handle.note_counts(read.micro_batch, found)

    def _branch(self, branch: Branch, edges: tuple[Edge, ...]) -> None:
        self.machine.streams.host_waits(edges)
        value = branch.value
        number = self._number(value) if value is not None else self.scalars[branch.scalar or ""]
        self._run(branch.then if number != 0 else branch.otherwise)

    def _bound_compute(self, operation: Compute | Fill | Copy) -> Callable[[], None]:
        streams, entry = self.machine.streams, self._entry(operation)
        pools, buffers = self.machine.memory.setting.pools, self.machine.program.by_name
        lent = any(pools.has(buffers[each.view.buffer].pool) for each in accesses(operation))
        if lent or self.machine.poison.is_on or streams.workers.has(operation.stream):
            return partial(self._compute, operation, entry)
        match operation:
            case Compute():
                action = self.machine.computer.again(operation, self.scalars)
            case Fill():
                action = partial(self._run_now, operation)
            case Copy():
                action = partial(self._copier.run, operation)
        return partial(streams.compute, entry, action)

    def _compute(self, operation: Compute | Fill | Copy, entry: StreamEntry) -> None:
        """Run an operation in order on its stream; a host thread gets the current memory."""
        machine = self.machine
        machine.poison.delay()
        if machine.streams.workers.has(operation.stream):
            action = self._for_thread(operation)
        else:
            action = partial(self._run_now, operation)
        machine.streams.compute(entry, action, self._busy(operation))
        if machine.poison.is_on and not machine.streams.workers.has(operation.stream):
            self.first_nan.look(self.first_nan.looking(operation, self.step))

    def _run_now(self, operation: Compute | Fill | Copy) -> None:
        match operation:
            case Compute():
                self.machine.computer.run(operation, self.scalars)
            case Fill(target=target):
                _fill(self.machine.memory.flat(target), self._filling(operation))
            case Copy():
                self._copier.run(operation)

    def _for_thread(self, operation: Compute | Fill | Copy) -> Callable[[], None]:
        match operation:
            case Compute():
                action = self.machine.computer.bound(operation, self.scalars)
            case Fill(target=target):
                filled = self.machine.memory.flat(target)
                action = partial(_fill, filled, self._filling(operation))
            case Copy():
                action = self._copier.bound(operation)
        poison = self.machine.poison
        if not poison.is_on:
            return action
        late_s, looking = poison.late_s(), self.first_nan.looking(operation, self.step)

        def late() -> None:
            time.sleep(late_s)
            action()
            self.first_nan.look(looking)

        return late

    def _filling(self, operation: Fill) -> float:
        scale = 1.0 if operation.scalar is None else self.scalars[operation.scalar]
        return operation.value * scale

    def _busy(self, operation: StreamOperation) -> list[Awaitable]:
        """Return the operations that still use `operation`'s memory for a previous buffer."""
        memory = self.machine.memory
        if not memory.lends:
            return []
        return [each for access in accesses(operation) for each in memory.busy(access.view.buffer)]

    def _number(self, view: View) -> float:
        return float(self.machine.memory.flat(view).item())

    def _set_scalar(self, operation: SetScalar) -> None:
        counter = operation.counter
        if counter is not None and self.scalars[counter] % operation.every != 0:
            return
        value = self.scalars[operation.scalar] * operation.multiply + operation.add
        self.scalars[operation.scalar] = min(max(value, operation.minimum), operation.maximum)

    def _bound_collective(
        self, operation: StreamOperation, members: tuple[Communication, ...]
    ) -> Callable[[], None]:
        machine = self.machine
        if any(isinstance(each, AllToAll) and self.counted.rows(each) for each in members):
            return partial(self._exchange_rows, operation, members, self._entry(operation))
        lines = [self.ledger.transfer(member) for member in members]
        buffers = {access.view.buffer for access in accesses(operation)}
        entry, hand_over = self._entry(operation), partial(_hand_over, machine, members)

        delay = machine.poison.delay if machine.poison.is_on else None

        def issue() -> None:
            self.ledger.hand_over(self.step, lines)
            self._travelled |= buffers
            if delay is not None:
                delay()
            machine.streams.communicate(entry, hand_over)

        return issue

    def _exchange_rows(
        self, operation: StreamOperation, members: tuple[Communication, ...], entry: StreamEntry
    ) -> None:
        """Exchange counted rows, in blocks of the sizes that the host has read."""
        sized = tuple(
            self.counted.sized(each)
            if isinstance(each, AllToAll) and self.counted.rows(each)
            else each
            for each in members
        )
        self.ledger.hand_over(self.step, [self.ledger.transfer(each) for each in sized])
        self._travelled |= {access.view.buffer for access in accesses(operation)}
        self.machine.poison.delay()
        self.machine.streams.communicate(entry, partial(_hand_over, self.machine, sized))

    def _bound_free(self, free: Free) -> Callable[[], None]:
        buffer, uses = free.buffer, self._needed(free, free.uses)
        line = self.ledger.entry(free.id, buffer, -1)
        home = self.machine.program.by_name[buffer].home
        if free.mode is FreeMode.WAITED and self.machine.program.by_name[buffer].produced:
            return self._bound_free_of_produced(home, buffer, uses, line)
        return partial(self._free, home, free, uses, line)

    def _bound_free_of_produced(
        self, home: str, buffer: str, uses: tuple[Edge, ...], line: LedgerEntry
    ) -> Callable[[], None]:
        """Return a fast `_free` for memory of autograd: half of all operations are such frees."""
        forget, home_waits = self.machine.computer.forget, self.machine.streams.home_waits
        take_away = self.machine.memory.take_away

        def free() -> None:
            forget(buffer)
            home_waits(home, buffer, uses, take_away(buffer).parts.clear, lent=False)
            if self.keeps_ledger:
                self.ledger.enter(self.step, line)

        return free

    def _free(self, home: str, free: Free, uses: tuple[Edge, ...], line: LedgerEntry) -> None:
        machine, buffer = self.machine, free.buffer
        machine.computer.forget(buffer)
        if free.mode is FreeMode.DEFERRED:
            finish = machine.streams.finish(home, buffer, uses)
            self._deferred.append(_Deferred(buffer, machine.memory.take_away(buffer), finish))
            return
        if free.mode is FreeMode.HOST:
            machine.streams.host_waits(uses)
        remains = machine.memory.take_away(buffer)
        drop, lent = self._dropping(buffer, remains), remains.held is not None
        busy = machine.streams.home_waits(home, buffer, uses, drop, lent=lent)
        if lent:
            machine.memory.give_back(buffer, remains, busy)
        if self.keeps_ledger:
            self.ledger.enter(self.step, line)

    def _dropping(self, buffer: str, remains: Remains) -> Callable[[], None]:
        travelled = buffer in self._travelled
        self._travelled.discard(buffer)
        drop = self.machine.memory.drop
        return partial(drop, buffer, remains, remains.held, travelled=travelled)

    def _return_deferred(self, name: str) -> None:
        waiting: list[_Deferred] = []
        for deferred in self._deferred:
            if deferred.finish():
                self._dropping(deferred.buffer, deferred.remains)()
                self.machine.memory.give_back(deferred.buffer, deferred.remains)
                self.ledger.enter(self.step, self.ledger.entry(name, deferred.buffer, -1))
            else:
                waiting.append(deferred)
        self._deferred = waiting

    def _entry(self, operation: StreamOperation) -> StreamEntry:
        found = StreamEntry(
            operation=operation.id,
            stream=operation.stream,
            after=self._needed(operation, operation.after),
            is_awaited=operation.id in self._awaited or operation.id not in self._waits.edges,
        )
        if isinstance(operation, Compute | Fill | Copy):
            return found
        groups = self.machine.schedule.groups
        member = self.machine.communicators.member(operation.group)
        peers = member.peers(operation)
        return replace(
            found,
            group=operation.group,
            group_number=[group.name for group in groups].index(operation.group),
            ranks=peers or member.ranks,
            is_message=bool(peers),
            touches=tuple(self._touches(operation)),
        )

    def _touches(self, operation: StreamOperation) -> Iterator[BufferAccess]:
        for access in accesses(operation):
            if access.view.buffer in self.machine.memory.routed:
                start, size = 0, access.view.size
            else:
                start, size = self.machine.memory.extent(access.view)
            yield BufferAccess(access.view.buffer, start, start + size, access.writes)


def _fill(target: torch.Tensor, value: float) -> None:
    target.fill_(value)


def _hand_over(machine: RankMachine, members: tuple[Communication, ...]) -> list[PendingWork]:
    handed: list[IssuedCollective] = []
    for member in members:
        target = None if member.writes is None else machine.memory.own(member.writes)
        source = None if member.reads is None else machine.memory.flat(member.reads)
        handed.append(IssuedCollective(member, source, target))
    if not machine.poison.is_on:
        return [*machine.communicators.issue(handed)]
    place = machine.communicators.member(members[0].group).place
    veiled = machine.poison.veiled(handed, place)
    return [*machine.communicators.issue([each.handed for each in veiled]), *veiled]
