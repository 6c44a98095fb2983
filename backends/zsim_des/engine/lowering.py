"""Converts a program for the engine, once for all ranks: ids to numbers, costs to times."""

from functools import partial
from typing import assert_never, cast

from zsim.cluster.cluster import Gpu
from zsim.cluster.profile.host_launch import FREE
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.compute.roofline import moving_ps, operation_ps
from zsim.network.volume import ring_equivalent_bytes
from zsim.schedule.fusions import Fusions, is_in_parts
from zsim.schedule.operation import (
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
    Write,
    walk,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.units import PICOSECONDS_PER_SECOND
from zsim_des.engine.fused_entries import FusedEntries
from zsim_des.engine.gpu_sharing import PARTS, library_sms, uses_libraries
from zsim_des.engine.instruction import (
    NOTHING,
    After,
    AllocateRequest,
    Choose,
    Enqueue,
    HostNote,
    Instruction,
    Lowered,
    Stop,
)
from zsim_des.network.carried import Carried, access_of, carried_by


class Landings:
    """Collectives in flight, in order of issue, that the host has to complete.

    Empty unless `times` are given: the measured times of a host that runs operations itself. Such a
    host does part of a collective: it sums the received parts and divides. It does so before the
    first operation that waits for the collective, or for a later one on its stream, even if the
    last byte arrived long before (`zsim_torch.execute.streams.CpuStreams`).
    """

    def __init__(self, times: MeasuredTimes | None, schedule: Schedule) -> None:
        self._times = times
        self._sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self._flying: dict[int, tuple[str, str, int]] = {}

    def hand_over(self, operation: Communication | Together, slot: int) -> None:
        """Note that `operation` is in flight."""
        if self._times is None:
            return
        members = operation.members if isinstance(operation, Together) else (operation,)
        taken_s = sum(self._landing_s(member, self._times) for member in members)
        taken_ps = round(taken_s * PICOSECONDS_PER_SECOND)
        self._flying[slot] = operation.id, operation.stream, taken_ps

    def before(self, made: Instruction) -> list[Instruction]:
        """Return the host's waits before `made`; `made` includes the host time of the last one."""
        if not self._flying or isinstance(made, HostNote):
            return []
        found: list[Instruction] = []
        for slot in self._landed(made.after):
            name, _, taken_ps = self._flying.pop(slot)
            if isinstance(made, Enqueue | Stop | Choose):
                found.append(Stop(name, After((slot,), ()), made.launch_ps))
                made.launch_ps = taken_ps
        return found

    def _landed(self, after: After) -> list[int]:
        """Return the awaited slots and the slots handed to the same streams before them."""
        awaited = [slot for slot in after.here if slot in self._flying]
        last = {self._flying[slot][1]: slot for slot in sorted(awaited)}
        order = list(self._flying)
        return [
            slot
            for place, slot in enumerate(order)
            if (end := last.get(self._flying[slot][1])) is not None and place <= order.index(end)
        ]

    def _landing_s(self, member: Communication, times: MeasuredTimes) -> float:
        ranks = self._sizes[member.group]
        if ranks == 1 or not isinstance(member, CollectiveOperation):
            return 0.0
        return times.landing_s(member.name, ranks, member.whole.size * member.wire.size_bytes)


END = "the end of the step"
TRANSFERS = (Read, Write)
HANDED_OVER = (Communication, Together)
KERNELS = frozenset[type[Operation]]({Compute, Copy, Fill})
HOST_ACTIONS = (Allocate, HostWait, SetScalar, Branch)


class LoweringError(ValueError):
    """An operation that the engine cannot execute."""


def lower(
    schedule: Schedule, program: Program, gpu: Gpu, *, watched: bool = False, asks: bool = False
) -> Lowered:
    """Return the instructions of `program` on `gpu`; with every host note if `watched`.

    With `asks` the host requests memory at each allocation and notes each free. A watched run
    starts scalars from their initial values. Any other run starts them at zero, so that it shows
    the steady state of a schedule that counts down its first steps.

    Raises:
        LoweringError: an edge names an operation that is issued later.
        ClusterError: the GPU has no rate for the format of a kernel.
    """
    lowering = _Lowering(schedule, program, gpu, watched=watched, asks=asks)
    setup, step = lowering.part(program.setup), lowering.part(program.step)
    initial = {each.name: each.initial if watched else 0.0 for each in schedule.scalars}
    scalars = {name: initial[name] for name in lowering.decides}
    return Lowered(schedule.streams, lowering.slots, setup, step, lowering.awaited(), scalars)


def _measured_ps(times: MeasuredTimes, operation: Operation) -> int:
    return round(times.issue_s(operation) * PICOSECONDS_PER_SECOND)


def threads_of(schedule: Schedule, program: Program) -> frozenset[str]:
    """Return the streams that are host threads, or handles of reads and writes."""
    handles = {each.stream for each in program.patterns if isinstance(each, TRANSFERS)}
    return frozenset(handles | set(schedule.host_threads))


def _nothing(operation: Operation) -> int:
    """Return zero: the cost of `operation` on a host that issues in no time."""
    return 0


class _Lowering:
    """Converts the parts of one program to instructions. Slot numbers span setup and step."""

    def __init__(
        self, schedule: Schedule, program: Program, gpu: Gpu, *, watched: bool, asks: bool
    ) -> None:
        self.slots: dict[str, int] = {}
        self._program = program
        self._gpu = gpu
        costs = gpu.launch_costs
        is_free, measured = costs == FREE or schedule.with_host_time, gpu.measured
        self._launch_ps = _nothing if is_free else costs.issue_ps
        if measured is not None:
            self._launch_ps = partial(_measured_ps, measured)
        self._runs = measured is not None and measured.runs_on_host
        runs_on_host = measured if self._runs else None
        self._landings = Landings(runs_on_host, schedule)
        self._unissued_ps = 0  # host time of operations without an instruction, for the next one
        self._threads = threads_of(schedule, program)
        self._places = {pool.name: pool.place for pool in schedule.pools}
        self._schedule = schedule
        self._access = access_of(schedule)
        self._has_host = len(set(self._places.values())) > 1
        self._streams = {name: index for index, name in enumerate(schedule.streams)}
        self._sizes = {group.name: group.size(schedule.mesh) for group in schedule.groups}
        self._asks = asks
        self._noted: tuple[type[Operation], ...] = (Allocate,) if program.defers else ()
        if watched:
            self._noted = (Allocate, Free, SetScalar)
        elif asks:
            self._noted = (Free,)
        # Most operations allocate or free memory, and most of these cost the host no time.
        taken: set[type[Operation]] = {Allocate, Free} if not asks and measured is None else set()
        self._silent = frozenset(taken.difference(self._noted))
        self._waits: dict[tuple[Edge, ...], After] = {(): NOTHING}
        self._seen: set[str] = set()
        step = program.step_work
        read = {each.scalar for each in step if isinstance(each, Branch) and each.scalar}
        counters = {each.counter for each in step if isinstance(each, SetScalar) and each.counter}
        self.decides = frozenset(read | counters if read else ())
        self._timed: dict[tuple[int, ...], tuple[int, int]] = {}
        self._has_libraries = uses_libraries(program)
        self._fused: FusedEntries | None = None
        # A watcher observes whole operations.
        fusions = Fusions.of(() if watched or measured is not None else program.step)
        if fusions.computes:
            self._fused = FusedEntries(
                fusions,
                gpu,
                slots=self.slots,
                streams=self._streams,
                ranks=self._sizes,
                after=self._after,
            )

    def part(self, operations: tuple[Operation, ...]) -> tuple[Instruction, ...]:
        """Return the instructions of setup or of the step."""
        for operation in walk(operations):
            if type(operation) is Allocate or (type(operation) is Free and not operation.uses):
                continue  # most of these operations
            if _takes_a_slot(operation):
                self.slots[operation.id] = len(self.slots)
        made = self._list(operations)
        measured = self._gpu.measured
        if measured is not None and self._runs:  # at its end it waits for all that it handed over
            flying = [each.id for each in walk(operations) if isinstance(each, HANDED_OVER)]
            slots = tuple(self.slots[name] for name in flying)
            end = Stop(END, After(slots, ()), self._taken_ps())
            made += [*self._landings.before(end), end]
            made.append(Stop(END, NOTHING, round(measured.host.step_s * PICOSECONDS_PER_SECOND)))
        return tuple(made)

    def awaited(self) -> frozenset[int]:
        """Return the slots that some operation waits for by name."""
        every = self._waits.values()
        return frozenset(slot for after in every for slot in (*after.here, *after.earlier))

    def _list(self, operations: tuple[Operation, ...]) -> list[Instruction]:
        found: list[Instruction] = []
        for operation in operations:
            if type(operation) in self._silent and not (type(operation) is Free and operation.uses):
                continue
            made = self._instruction(operation)
            if made is None:  # no instruction, but it costs a measured host time
                self._unissued_ps += 0 if self._gpu.measured is None else self._launch_ps(operation)
            else:
                if not isinstance(made, HostNote):
                    made.launch_ps += self._taken_ps()
                if isinstance(operation, HANDED_OVER):
                    self._landings.hand_over(operation, self.slots[operation.id])
                else:
                    found += self._landings.before(made)
                if self._fused is not None and isinstance(made, Enqueue):
                    found += self._fused.of(operation, made)
                else:
                    found.append(made)
                if self._runs and isinstance(operation, Compute | Copy | Fill):
                    found += self._run_here(operation)
            counts = isinstance(operation, SetScalar) and operation.scalar in self.decides
            if counts or isinstance(operation, self._noted):
                found.append(HostNote(operation.id, operation))
            self._seen.add(operation.id)
        return found

    def _taken_ps(self) -> int:
        taken_ps, self._unissued_ps = self._unissued_ps, 0
        return taken_ps

    def _run_here(self, operation: Compute | Copy | Fill) -> list[Instruction]:
        """Return the wait of a host that runs `operation` itself, unless a host thread runs it."""
        if operation.stream in self._threads:
            return []
        return [Stop(operation.id, After((self.slots[operation.id],), ()), 0)]

    def _instruction(self, operation: Operation) -> Instruction | None:
        if type(operation) in KERNELS:  # most instructions are kernels
            return self._kernel(cast("Compute | Copy | Fill", operation))
        match operation:
            case Allocate():
                return AllocateRequest(operation.id, operation) if self._asks else None
            case SetScalar():
                return None
            case Compute():
                return self._kernel(operation)
            case Free():
                return self._free(operation)
            case Communication():
                return self._enqueue(operation, members=(operation,))
            case Together(members=members):
                return self._enqueue(operation, members=members)
            case Fill() | Copy():
                return self._kernel(operation)
            case HostWait(operation=edge) | ReadCounts(operation=edge):
                after = self._after(operation.id, (edge,))
                return Stop(operation.id, after, self._launch_ps(operation))
            case Branch():
                return self._choose(operation)
            case _:
                assert_never(operation)

    def _enqueue(
        self,
        operation: StreamOperation,
        *,
        time_ps: int = 0,
        moving_ps: int = 0,
        members: tuple[Communication, ...] = (),
    ) -> Enqueue:
        return Enqueue(
            self.slots[operation.id],
            operation.id,
            self._streams[operation.stream],
            self._after(operation.id, operation.after),
            time_ps,
            moving_ps,
            self._launch_ps(operation),
            operation,
            tuple([self._member(member) for member in members]) if members else (),
            None,
            self._taken_ps_of(members) if self._runs and members else 0,
            share=self._share_of(members),
        )

    def _taken_ps_of(self, members: tuple[Communication, ...]) -> int:
        """Return the time that `members` cost kernels on a host that runs these itself."""
        times = self._gpu.measured
        assert times is not None
        taken_s = 0.0
        for member in members:
            ranks = self._sizes[member.group]
            if ranks > 1 and isinstance(member, CollectiveOperation):
                size_bytes = member.whole.size * member.wire.size_bytes
                taken_s += times.taken_s(member.name, ranks, size_bytes)
        return round(taken_s * PICOSECONDS_PER_SECOND)

    def _share_of(self, members: tuple[Communication, ...]) -> int | None:
        """Return the multiprocessors that `members` take together; see `Enqueue`."""
        if any(map(is_in_parts, members)):
            return 0
        kernels, taken = self._gpu.kernels, library_sms(members) if self._has_libraries else 0
        if kernels is None or not taken:
            return None
        return min(PARTS, round(PARTS * taken / kernels.processors))

    def _member(self, member: Communication) -> tuple[Communication, int]:
        return member, ring_equivalent_bytes(member, self._sizes[member.group])

    def _kernel(self, operation: Compute | Copy | Fill) -> Enqueue:
        """Return an entry that takes GPU time, or that carries bytes on the host side.

        If the PCIe of a node is not described, a copy takes the time of device memory.
        """
        carries: Carried | None = None
        if self._has_host:
            carries = carried_by(
                operation, self._program, self._schedule, self._places, access=self._access
            )
        time_ps = moving = 0
        if carries is None or carries.kernel is None:
            time_ps, moving = self._times(operation)
        made = self._enqueue(operation, time_ps=time_ps, moving_ps=moving)
        made.carries = carries
        return made

    def _times(self, operation: Compute | Copy | Fill) -> tuple[int, int]:
        """Return the time of an operation alone, and the part of it that only moves memory.

        Segments of all micro-batches share their kernels, and copies their views, so each is timed
        once.
        """
        key: tuple[int, ...] = ()
        if isinstance(operation, Copy):
            views = id(operation.source), id(operation.target)
            key = (*views, operation.accumulate, operation.launches)
        elif isinstance(operation, Compute) and operation.kernels:
            key = (id(operation.kernels),)
        known = self._timed.get(key)
        if known is not None:
            return known
        time_ps, moving = operation_ps(operation, self._program, self._gpu), 0
        if self._gpu.collective_share or self._has_libraries:
            moving = moving_ps(operation, self._program, self._gpu)
        if key:
            self._timed[key] = time_ps, moving
        return time_ps, moving

    def _free(self, free: Free) -> Instruction | None:
        if not free.uses or free.mode is FreeMode.DEFERRED:
            return None
        after, launch_ps = self._after(free.id, free.uses), self._launch_ps(free)
        home = self._program.by_name[free.buffer].home
        if free.mode is FreeMode.HOST or (self._runs and home not in self._threads):
            return Stop(free.id, after, launch_ps)
        stream = self._streams[home]
        return Enqueue(self.slots[free.id], free.id, stream, after, 0, 0, launch_ps, None, ())

    def _choose(self, branch: Branch) -> Choose:
        after = self._after(branch.id, branch.after)
        sides = (branch.then, branch.otherwise)
        then, otherwise = (tuple(self._list(side)) for side in sides)
        slots = [
            tuple(self.slots[op.id] for op in walk(side) if op.id in self.slots) for side in sides
        ]
        launch_ps = self._launch_ps(branch)
        return Choose(branch.id, after, launch_ps, branch, then, otherwise, *slots)

    def _after(self, name: str, edges: tuple[Edge, ...]) -> After:
        if edges in self._waits:
            return self._waits[edges]
        here: list[int] = []
        earlier: list[int] = []
        for edge in edges:
            if isinstance(edge, Previous):
                if edge.operation in self.slots:
                    earlier.append(self.slots[edge.operation])
                continue
            if edge not in self._seen:
                raise LoweringError(f"{name}: waits for {edge}, which the host issues later")
            if edge in self.slots:
                here.append(self.slots[edge])
        made = self._waits[edges] = After(tuple(here), tuple(earlier))
        return made


def _takes_a_slot(operation: Operation) -> bool:
    """Return True if an operation can be waited for: it is on a stream, or a waited free."""
    if isinstance(operation, Free):
        return bool(operation.uses) and operation.mode is FreeMode.WAITED
    return not isinstance(operation, HOST_ACTIONS)
