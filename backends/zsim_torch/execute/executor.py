"""Runs the program of one rank: every operation of a schedule, in the order of its host."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, NamedTuple, assert_never

import torch

from zsim.network.volume import element_count, is_scalar, ring_equivalent_bytes
from zsim.schedule.access import accesses
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    FreeMode,
    HostWait,
    Operation,
    SetScalar,
    StreamOperation,
    Together,
    View,
)
from zsim.schedule.schedule import Kind, Program, Schedule
from zsim.trace.trace import BookEntry, Transfer
from zsim_torch.execute.agreement import IssuedLog
from zsim_torch.execute.collectives import IssuedCollective, ProcessGroups
from zsim_torch.execute.compute import Computer
from zsim_torch.execute.copying import Copier
from zsim_torch.execute.host_workers import Awaitable
from zsim_torch.execute.live_memory import LiveMemory, MemoryFaultError, Remains
from zsim_torch.execute.poison import Poison, Sighting, has_no_number
from zsim_torch.execute.streams import BufferAccess, Completion, PendingWork, StreamEntry, Streams
from zsim_torch.supervise.progress_record import note


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMachine:
    """Everything that an executor works with on its rank."""

    schedule: Schedule
    program: Program
    coordinates: Coordinates
    memory: LiveMemory
    streams: Streams
    communicators: ProcessGroups
    computer: Computer
    poison: Poison


class _Deferred(NamedTuple):
    """A freed buffer whose uses have not finished yet."""

    buffer: str
    remains: Remains
    finish: Completion


class _Looking(NamedTuple):
    """An operation whose results are looked at, and what it writes."""

    operation: str
    step: int
    place: int
    written: list[torch.Tensor]


SETUP: Final = -1


@dataclass(slots=True)
class Executor:
    """One rank's host: issues operations, keeps the book and the list of transfers.

    Every operation is a call of its own, so that no local variable keeps memory alive past it. In
    poison mode `sighting` is the first operation that wrote what is no number. `on_issue` is told
    the step and id of each operation before it is issued, and at the end of a step an empty id.
    Without `keeps_trace`, book, transfers and events are those of the step that runs.
    """

    machine: RankMachine
    scalars: dict[str, float]
    on_issue: Callable[[int, str], None] | None = None
    keeps_trace: bool = True
    step: int = SETUP
    operation: str = ""
    book: list[BookEntry] = field(default_factory=list[BookEntry])
    transfers: list[Transfer] = field(default_factory=list[Transfer])
    issued: IssuedLog = field(default_factory=IssuedLog)
    _logged: int = 0
    _deferred: list[_Deferred] = field(default_factory=list[_Deferred])
    _travelled: set[str] = field(default_factory=set[str])
    _entries: dict[str, StreamEntry] = field(default_factory=dict[str, StreamEntry])
    sighting: Sighting | None = None
    _looked: int = 0
    _copier: Copier = field(init=False)
    _role: str = field(init=False)

    def __post_init__(self) -> None:
        self._copier = Copier(self.machine.memory)
        several = len(self.machine.schedule.programs) > 1
        self._role = f" of {self.machine.program.role}" if several else ""

    def run_setup(self) -> None:
        """Run setup, and drain every stream of this rank."""
        self._run(self.machine.program.setup)
        self.machine.streams.drain()
        self._end_step()

    def run_again(self, operations: Iterable[Operation]) -> None:
        """Run operations of setup once more, and drain every stream."""
        self.step = self.machine.streams.step = SETUP
        self._run(operations)
        self.machine.streams.drain()
        self._end_step()

    def run_step(self, step: int, given: Mapping[str, float]) -> None:
        """Step number `step` is issued, with what the caller gives for it in host scalars."""
        if not self.keeps_trace:
            self._forget()
        self.step = self.machine.streams.step = step
        self.scalars |= given
        self._run(self.machine.program.step)
        self._end_step()

    def _end_step(self) -> None:
        self.machine.streams.end_step()
        self._tell("")
        self.issued.add_step(self.step, self.transfers[self._logged :])
        self._logged = len(self.transfers)

    def _forget(self) -> None:
        """Forget the last step, so that memory does not grow with the steps."""
        self.book.clear()
        self.transfers.clear()
        self._logged = 0
        self.machine.streams.forget()

    def _tell(self, operation: str) -> None:
        if self.on_issue is not None:
            self.on_issue(self.step, operation)

    def _run(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            step = "" if self.step == SETUP else f" in step {self.step}"
            note(f"{operation.id}{step}{self._role}")
            self._tell(operation.id)
            self.operation = operation.id
            self._issue(operation)

    def _issue(self, operation: Operation) -> None:
        machine = self.machine
        match operation:
            case Allocate(buffer=buffer):
                self._return_deferred(operation.id)
                machine.memory.allocate(buffer)
                self._enter(operation.id, buffer, 1)
            case Free():
                self._free(operation)
            case HostWait(operation=edge):
                machine.streams.host_waits((edge,))
            case SetScalar():
                self._set_scalar(operation)
            case Branch(value=value, scalar=scalar, then=then, otherwise=otherwise):
                machine.streams.host_waits(operation.after)
                number = self._number(value) if value is not None else self.scalars[scalar or ""]
                self._run(then if number != 0 else otherwise)
            case Compute() | Fill() | Copy():
                self._compute(operation)
            case Communication():
                self._communicate(operation, (operation,))
            case Together(members=members):
                self._communicate(operation, members)
            case _:
                assert_never(operation)

    def _compute(self, operation: Compute | Fill | Copy) -> None:
        """Run an operation in order on its stream; a thread is given the memory as it is now."""
        machine = self.machine
        machine.poison.delay()
        if machine.streams.workers.has(operation.stream):
            action = self._for_thread(operation)
        else:
            action = partial(self._run_now, operation)
        machine.streams.compute(self._entry(operation), action, self._busy(operation))
        if machine.poison.is_on and not machine.streams.workers.has(operation.stream):
            self._look(self._looking(operation))

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
        late_s, looking = poison.late_s(), self._looking(operation)

        def late() -> None:
            time.sleep(late_s)
            action()
            self._look(looking)

        return late

    def _filling(self, operation: Fill) -> float:
        scale = 1.0 if operation.scalar is None else self.scalars[operation.scalar]
        return operation.value * scale

    def _busy(self, operation: StreamOperation) -> list[Awaitable]:
        """Return what still uses memory of `operation` since it was another buffer's."""
        memory = self.machine.memory
        if not memory.lends:
            return []
        return [each for access in accesses(operation) for each in memory.busy(access.view.buffer)]

    def _looking(self, operation: StreamOperation) -> "_Looking":
        """Return what `operation` writes, where the host can see it."""
        memory, written = self.machine.memory, list[torch.Tensor]()
        self._looked += 1
        if self.sighting is None and memory.setting.device.type == "cpu":
            for access in accesses(operation):
                with suppress(MemoryFaultError):  # a micro-batch, a file, what autograd keeps
                    if access.writes:
                        written += [each for _, each in memory.pieces(access.view)]
        return _Looking(operation.id, self.step, self._looked, written)

    def _look(self, looking: "_Looking") -> None:
        """Note the first operation that wrote what is no number."""
        if has_no_number(looking.written):
            rank = self.machine.schedule.mesh.rank(self.machine.coordinates)
            seen = Sighting(
                step=looking.step, place=looking.place, rank=rank, operation=looking.operation
            )
            self.sighting = seen if self.sighting is None else min(seen, self.sighting)

    def _number(self, view: View) -> float:
        return float(self.machine.memory.flat(view).item())

    def _set_scalar(self, operation: SetScalar) -> None:
        counter = operation.counter
        if counter is not None and self.scalars[counter] % operation.every != 0:
            return
        value = self.scalars[operation.scalar] * operation.multiply + operation.add
        self.scalars[operation.scalar] = min(max(value, operation.minimum), operation.maximum)

    def _communicate(self, operation: StreamOperation, members: tuple[Communication, ...]) -> None:
        machine = self.machine
        for member in members:
            self._note_transfer(member)
        for access in accesses(operation):
            self._travelled.add(access.view.buffer)

        machine.poison.delay()
        machine.streams.communicate(self._entry(operation), lambda: _hand_over(machine, members))

    def _note_transfer(self, member: Communication) -> None:
        count = len(self.machine.communicators.member(member.group).ranks)
        self.transfers.append(
            Transfer(
                operation=member.id,
                step=self.step,
                group=member.group,
                collective=member.name,
                elements=element_count(member),
                bytes=ring_equivalent_bytes(member, count),
                scalar=is_scalar(member),
            )
        )

    def _free(self, operation: Free) -> None:
        machine, buffer = self.machine, operation.buffer
        machine.computer.forget(buffer)
        home = machine.program.by_name[buffer].home
        if operation.mode is FreeMode.DEFERRED:
            finish = machine.streams.finish(home, buffer, operation.uses)
            self._deferred.append(_Deferred(buffer, machine.memory.take_away(buffer), finish))
            return
        if operation.mode is FreeMode.HOST:
            machine.streams.host_waits(operation.uses)
        remains = machine.memory.take_away(buffer)
        drop = self._dropping(buffer, remains)
        busy = machine.streams.home_waits(home, buffer, operation.uses, drop)
        machine.memory.give_back(buffer, remains, busy)
        self._enter(operation.id, buffer, -1)

    def _dropping(self, buffer: str, remains: Remains) -> Callable[[], None]:
        travelled = buffer in self._travelled
        self._travelled.discard(buffer)
        return partial(self.machine.memory.drop, buffer, remains, travelled=travelled)

    def _return_deferred(self, name: str) -> None:
        waiting: list[_Deferred] = []
        for deferred in self._deferred:
            if deferred.finish():
                self._dropping(deferred.buffer, deferred.remains)()
                self.machine.memory.give_back(deferred.buffer, deferred.remains)
                self._enter(name, deferred.buffer, -1)
            else:
                waiting.append(deferred)
        self._deferred = waiting

    def _enter(self, name: str, buffer: str, sign: int) -> None:
        booked = self.machine.program.by_name[buffer]
        self.book.append(
            BookEntry(
                operation=name,
                step=self.step,
                pool=booked.pool,
                buffer=buffer,
                kind=booked.kind,
                change_bytes=sign * booked.size_bytes,
            )
        )

    def _entry(self, operation: StreamOperation) -> StreamEntry:
        found = self._entries.get(operation.id)
        if found is None:
            found = StreamEntry(
                operation=operation.id, stream=operation.stream, after=operation.after
            )
            if not isinstance(operation, Compute | Fill | Copy):
                groups = self.machine.schedule.groups
                member = self.machine.communicators.member(operation.group)
                peers = member.peers(operation)
                found = replace(
                    found,
                    group=operation.group,
                    group_number=[group.name for group in groups].index(operation.group),
                    ranks=peers or member.ranks,
                    is_message=bool(peers),
                    touches=tuple(self._touches(operation)),
                )
            self._entries[operation.id] = found
        return found

    def _touches(self, operation: StreamOperation) -> Iterator[BufferAccess]:
        for access in accesses(operation):
            start, size = self.machine.memory.extent(access.view)
            yield BufferAccess(access.view.buffer, start, start + size, access.writes)


STATE: Final = (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)
"""What a run leaves behind. A gradient may hold no number in a step that overflows."""


def sighting_of(executor: Executor, losses: Iterable[float]) -> Sighting | None:
    """Return where poison was read first, if a result or a loss is not a number.

    On a GPU the host does not look at each operation, and only the rank is known.
    """
    machine = executor.machine
    program, memory = machine.program, machine.memory
    left = (memory.left(name) for name in program.persistent if program.by_name[name].kind in STATE)
    if not any(math.isnan(loss) for loss in losses) and not has_no_number(left):
        return None
    rank = machine.schedule.mesh.rank(machine.coordinates)
    return executor.sighting or Sighting(
        step=executor.step, place=sys.maxsize, rank=rank, operation="an operation"
    )


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
