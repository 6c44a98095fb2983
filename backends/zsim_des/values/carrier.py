"""Carries values through a simulated run: the memory of every rank, and its accesses over time.

An operation reads at its start and writes at its end. In between, its inputs must not change, and
its outputs hold no valid value: they are spoiled. A collective completes for all its members at
once. Buffers are bound to blocks of memory when the host issues an operation that uses them. A free
spoils its block on the home stream, after all that was issued there before, so memory reused too
early really overlaps.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic

from zsim.backend.values import A, Seat, Values
from zsim.model.generator import Draw
from zsim.schedule.access import accesses
from zsim.schedule.issue_order import NO_OVERFLOW, SETUP
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Compute,
    Copy,
    Fill,
    Free,
    FreeMode,
    Operation,
    SetScalar,
    Together,
)
from zsim.schedule.schedule import Buffer, Schedule
from zsim_des.engine.instruction import Enqueue
from zsim_des.values.meeting import Meeting, Meetings
from zsim_des.values.running import BlockAccess, Fault, Running
from zsim_des.values.truth import given
from zsim_des.values.value_memory import BlockMemory, MemoryBlock

FAULTS_MAX = 20
"""Maximum number of faults to record; an incorrect run soon has thousands."""

STATE = "state of its generator"
"""Key of the generator state of an operation that draws, among the host scalars it reads."""

Touch = tuple[str, int, int, bool, bool]
"""Buffer, start and size on a rank, whether it is read, and whether it is written."""


class Carrier(Generic[A]):
    """A `RunWatcher` that applies `values` to a run in which every rank is simulated.

    `settle` applies the recorded events in order of time; call it after the run. `given` returns
    the value that the caller sets in a host scalar before a step.
    """

    def __init__(
        self,
        schedule: Schedule,
        values: Values[A],
        overflow_steps: frozenset[int] = NO_OVERFLOW,
        given: Callable[[str, int], float] = given,
    ) -> None:
        self.faults: list[Fault] = []
        self.seats = [
            Seat(rank, schedule.mesh.coordinates(rank), schedule.program_of(rank))
            for rank in range(schedule.mesh.size)
        ]
        self.memory = [BlockMemory(values) for _ in self.seats]
        initial = {scalar.name: scalar.initial for scalar in schedule.scalars}
        self.scalars = [dict(initial) for _ in self.seats]
        self._given = given
        self._given_for = dict.fromkeys(range(schedule.mesh.size), SETUP)
        self._schedule = schedule
        self._values = values
        self._overflow_steps = overflow_steps
        self._counts: list[Counter[str]] = [Counter() for _ in self.seats]
        self._states: list[dict[str, int]] = [{} for _ in self.seats]
        self._touches: dict[tuple[int, str], list[Touch]] = {}
        self._events: list[tuple[int, int, Callable[[], Iterable[Fault] | None]]] = []
        self._running: dict[tuple[int, int, int], tuple[Running[A], list[Meeting[A]]]] = {}
        self._ends: dict[tuple[int, int, str], int] = {}
        self._tails: dict[tuple[int, str], Running[A] | int] = {}
        self._deferred: list[list[tuple[int, Free, MemoryBlock[A]]]] = [[] for _ in self.seats]
        self._meetings = Meetings[A](schedule)
        self._ending: set[Meeting[A]] = set()
        self._behind: list[tuple[int, A]] = []

    def act(self, rank: int, step: int, operation: Operation, host_ps: int) -> None:
        """Record a host action: allocate, free, set a scalar or take a branch."""
        self._give(rank, step)
        match operation:
            case Allocate(buffer=name):
                self._return_deferred(rank, host_ps)
                if not self.memory[rank].allocate(self._buffer(rank, name)):
                    self._blame(
                        Fault(rank, step, operation.id, name, "allocated while it is alive")
                    )
            case Free():
                self._free(rank, step, operation, host_ps)
            case SetScalar():
                set_scalar(operation, self.scalars[rank])
            case Branch():
                for window in self._windows(rank, step, operation):
                    self._add(host_ps, partial(self._branch, rank, step, operation.id, window))
            case _:
                raise AssertionError(operation)

    def put(self, rank: int, step: int, entry: Enqueue, host_ps: int) -> None:
        """Record an operation put on its stream; bind its buffers to their current memory."""
        self._give(rank, step)
        seat, operation = self.seats[rank], entry.operation
        stream = self._schedule.streams[entry.stream]
        running: Running[A] = Running(seat, step, entry.name, stream, [])
        meetings: list[Meeting[A]] = []
        if operation is None:
            free = seat.program.by_id[entry.name]
            assert isinstance(free, Free)
            block = self.memory[rank].blocks.get(free.buffer)
            if block is not None:
                running.frees.append((host_ps, block.memory))
        else:
            running.windows = self._windows(rank, step, operation)
            if isinstance(operation, Compute | Fill | Copy):
                running.operation = operation
                running.scalars = self._read_scalars(rank, operation)
            else:
                members = operation.members if isinstance(operation, Together) else (operation,)
                meetings = self._meetings.seat(running, members)
        self._running[rank, step, entry.slot] = running, meetings
        self._tails[rank, stream] = running

    def end(self, rank: int, step: int, slot: int, span_ps: tuple[int, int]) -> None:
        """Record when an entry runs, and schedule its accesses to memory.

        Members of a collective end at one time, though their calls come in some order. Blocks that
        their frees spoil are spoiled after all of them. A message arrives at the earlier end of its
        two operations.
        """
        running, meetings = self._running.pop((rank, step, slot))
        start_ps, end_ps = span_ps
        self._ends[rank, step, running.name] = end_ps
        if running.windows:
            self._add(start_ps, partial(running.begin, self._values))
        if running.operation is not None:
            self._add(end_ps, partial(running.complete, self._values))
        for meeting in meetings:
            if meeting.ends():
                self._add(end_ps, partial(meeting.complete, self._values))
                self._ending.discard(meeting)
            elif not meeting.is_message:
                self._ending.add(meeting)
        self._behind += [(max(end_ps, host_ps), memory) for host_ps, memory in running.frees]
        if not self._ending:
            for time_ps, memory in self._behind:
                self._add(time_ps, partial(self._values.invalidate, memory))
            self._behind.clear()
        if self._tails[rank, running.stream] is running:
            self._tails[rank, running.stream] = end_ps

    def settle(self) -> None:
        """Apply all events in order of time; at equal times, in order of recording."""
        for _, _, happen in sorted(self._events, key=lambda event: event[:2]):
            for fault in happen() or ():
                self._blame(fault)
        self._events.clear()

    def _add(self, time_ps: int, happen: Callable[[], Iterable[Fault] | None]) -> None:
        self._events.append((time_ps, len(self._events), happen))

    def _blame(self, fault: Fault) -> None:
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(fault)

    def _buffer(self, rank: int, name: str) -> Buffer:
        return self.seats[rank].program.by_name[name]

    def _give(self, rank: int, step: int) -> None:
        """Set the scalars that the caller gives before a step, when the host begins it."""
        if self._given_for[rank] != step:
            self._given_for[rank] = step
            for scalar in self._schedule.scalars:
                if scalar.given:
                    self.scalars[rank][scalar.name] = self._given(scalar.name, step)

    def _read_scalars(self, rank: int, operation: Compute | Fill | Copy) -> dict[str, float]:
        """Return the host scalars that the operation reads now, and its generator state."""
        if isinstance(operation, Compute) and operation.draw is not None:
            return {STATE: self._state(rank, operation.id, operation.draw)}
        reads = isinstance(operation, Compute) and bool(operation.scalars or operation.rule)
        reads = reads or (isinstance(operation, Fill) and operation.scalar is not None)
        return dict(self.scalars[rank]) if reads else {}

    def _state(self, rank: int, name: str, draw: Draw) -> int:
        """Return the state number that an operation draws with: the next, or a restored one."""
        counts, states = self._counts[rank], self._states[rank]
        if draw.restores is None:
            counts[draw.generator] += 1
            states[name] = counts[draw.generator]
        else:
            states[name] = states.get(draw.restores, 0)
        return states[name]

    def _windows(self, rank: int, step: int, operation: Operation) -> list[BlockAccess[A]]:
        key = (rank, operation.id)
        touches = self._touches.get(key)
        if touches is None:
            at, extent = self.seats[rank].coordinates, self._schedule.extent
            # A copy by parameter leaves target elements unchanged that its source does not hold.
            leaves_some = isinstance(operation, Copy) and operation.by_parameter
            touches = self._touches[key] = [
                (view.buffer, *extent(view, at), reads or (leaves_some and writes), writes)
                for view, reads, writes in accesses(operation)
            ]
        found: list[BlockAccess[A]] = []
        blocks = self.memory[rank].blocks
        for buffer, start, size, reads, writes in touches:
            block = blocks.get(buffer)
            if block is None:
                self._blame(Fault(rank, step, operation.id, buffer, "used without memory"))
                declared = self._buffer(rank, buffer)
                memory = self._values.memory(declared.elements, declared.dtype)
                block = MemoryBlock(declared.elements, memory)
            now = self._values.window(block.memory, start, size)
            found.append(BlockAccess(buffer, block, start, size, now, reads, writes))
        return found

    def _free(self, rank: int, step: int, free: Free, host_ps: int) -> None:
        memory = self.memory[rank]
        buffer = self._buffer(rank, free.buffer)
        block = memory.blocks.pop(free.buffer, None)
        if block is None:
            self._blame(Fault(rank, step, free.id, free.buffer, "freed without memory"))
        elif free.mode is FreeMode.DEFERRED:
            self._deferred[rank].append((step, free, block))
        else:
            memory.give_back(buffer, block)
            if not free.uses or free.mode is FreeMode.HOST:
                self._invalidate_after(rank, buffer.home, block, host_ps)

    def _return_deferred(self, rank: int, host_ps: int) -> None:
        """Free the blocks of deferred frees whose uses have finished by now."""
        waiting: list[tuple[int, Free, MemoryBlock[A]]] = []
        for step, free, block in self._deferred[rank]:
            ends = [self._ends.get((rank, step, use), host_ps + 1) for use in free.uses]
            if max(ends, default=0) > host_ps:
                waiting.append((step, free, block))
                continue
            buffer = self._buffer(rank, free.buffer)
            self.memory[rank].give_back(buffer, block)
            self._invalidate_after(rank, buffer.home, block, host_ps)
        self._deferred[rank] = waiting

    def _invalidate_after(self, rank: int, home: str, block: MemoryBlock[A], host_ps: int) -> None:
        """Spoil a block after all current work of its home stream, and not before `host_ps`."""
        tail = self._tails.get((rank, home), 0)
        if isinstance(tail, int):
            self._add(max(tail, host_ps), partial(self._values.invalidate, block.memory))
        else:
            tail.frees.append((host_ps, block.memory))

    def _branch(self, rank: int, step: int, name: str, window: BlockAccess[A]) -> Iterable[Fault]:
        """Yield a fault unless the window's value selects the branch that this host took."""
        if self._values.is_invalidated(window.now):
            yield Fault(rank, step, name, window.buffer, "reads what nobody wrote")
        elif self._values.is_zero(window.now) is (step in self._overflow_steps):
            yield Fault(rank, step, name, window.buffer, "sends the host the other way")


def set_scalar(change: SetScalar, scalars: dict[str, float]) -> None:
    """Apply `change` to the host scalars."""
    if change.counter is not None and scalars[change.counter] % change.every != 0:
        return
    value = scalars[change.scalar] * change.multiply + change.add
    scalars[change.scalar] = min(max(value, change.minimum), change.maximum)
