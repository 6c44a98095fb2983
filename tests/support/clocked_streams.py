"""A third implementation of streams: operations run one by one, vector clocks judge their order.

The executor of real ranks runs on it unchanged. Nothing overlaps here; what could is told by the
clocks: an access that is ordered after another by streams, edges and waits of the host is fine, one
that is merely later is a hazard. Knows nothing of `zsim.proof`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

import torch
from torch import nn

from zsim.schedule.access import accesses
from zsim.schedule.operation import Allocate, Branch, Edge, Previous, StreamOperation, View
from zsim.schedule.schedule import Place, Schedule
from zsim.trace.trace import Event
from zsim_record.clocks.access_history import RecordedAccess
from zsim_record.clocks.block_contract import BlockContract, TrackedBlock
from zsim_record.clocks.byte_region import ByteRegion
from zsim_record.clocks.call_stack import CallStack, StackFrame
from zsim_record.clocks.finding import BlockKind, Hazard, HazardList, Site
from zsim_record.clocks.stream_clock import ClockMark, ClockTimeline, StreamClocks, Tick
from zsim_torch.execute.flights import PendingWork, StreamEntry
from zsim_torch.execute.host_memory import HostPools
from zsim_torch.execute.host_workers import Awaitable, HostWorkers, worker_streams
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.execute.streams import Completion
from zsim_torch.module.absent import emptied
from zsim_torch.module.unit import UnitChoice, resolve

KIND = {
    Place.DEVICE: BlockKind.DEVICE,
    Place.HOST: BlockKind.PINNED,
    Place.NVME: BlockKind.FILE,
}


class Instance(NamedTuple):
    """One time that an operation ran: where, and what waiting for it waits for."""

    line: ClockTimeline
    tick: Tick
    mark: ClockMark


class ClockedStreams:
    """Streams of one rank on which every access is judged. Threads and handles are streams, too.

    No stream of a device can wait for a thread or a handle: such an edge orders nothing by itself.
    """

    def __init__(self, schedule: Schedule) -> None:
        (self._program,) = schedule.programs
        self._schedule = schedule
        self._coordinates = schedule.mesh.coordinates(0)
        self.step = -1
        self.keeps_trace = True
        self.workers = HostWorkers()
        self._clocks = StreamClocks()
        unique = count()

        def site_of(_: CallStack | None) -> Site:  # each hazard has a place of its own
            return (StackFrame("", next(unique), ""),)

        self.hazards = HazardList(self._clocks, site_of)
        self._contract = BlockContract(self._clocks, self.hazards)
        self._host = self._clocks.host()
        self._lines = {name: self._clocks.stream(name) for name in schedule.streams}
        away = worker_streams(schedule, self._program)
        self._away = {self._lines[name].number for name in away}
        self._places = {pool.name: pool.place for pool in schedule.pools}
        self._blocks: dict[str, TrackedBlock] = {}
        self._current: dict[str, Instance] = {}
        self._previous: dict[str, Instance] = {}
        self._groups: dict[str, Instance] = {}
        self._branch: Branch | None = None

    # Told by the executor.

    def issued(self, step: int, name: str) -> None:
        """Note that the host comes to an operation."""
        operation = self._program.by_id.get(name)
        self._branch = operation if isinstance(operation, Branch) else None
        if isinstance(operation, Allocate):
            buffer = self._program.by_name[operation.buffer]
            self._blocks[buffer.name] = self._contract.allocate(
                buffer.name,
                KIND[self._places[buffer.pool]],
                buffer.size_bytes,
                home=self._lines[buffer.home],
            )

    def compute(
        self,
        entry: StreamEntry,
        action: Callable[[], None],
        awaited: Sequence[Awaitable] = (),
    ) -> None:
        """Order and judge the operation, then run it."""
        self._start(entry)
        action()

    def communicate(self, entry: StreamEntry, issue: Callable[[], list[PendingWork]]) -> None:
        """Order it after the one before on its communicator as well."""
        if entry.group in self._groups:
            self._follow(self._lines[entry.stream], self._groups[entry.group])
        self._groups[entry.group] = self._start(entry)
        for work in issue():
            work.wait()

    def _start(self, entry: StreamEntry) -> Instance:
        line = self._lines[entry.stream]
        for each in self._instances(entry.after):
            self._follow(line, each)
        tick = self._clocks.launch(self._host, line)
        operation = self._program.by_id[entry.operation]
        assert isinstance(operation, StreamOperation)
        for access in accesses(operation):
            self._use(access.view, line, tick, writes=access.writes, name=entry.operation)
        made = Instance(line, tick, self._clocks.mark(line))
        self._current[entry.operation] = made
        return made

    def _use(self, view: View, line: ClockTimeline, tick: Tick, *, writes: bool, name: str) -> None:
        start, size = self._schedule.extent(view, self._coordinates)
        width = self._program.by_name[view.buffer].dtype.size_bytes
        if size:
            region = ByteRegion(start * width, (start + size) * width)
            self._contract.use(
                self._blocks[view.buffer], RecordedAccess(line, tick, region, writes, name)
            )

    def _follow(self, line: ClockTimeline, each: Instance) -> None:
        if each.line.number not in self._away or line.number in self._away:
            self._clocks.wait(line, each.mark)

    def _instances(self, edges: Iterable[Edge]) -> list[Instance]:
        found = [
            self._previous.get(edge.operation)
            if isinstance(edge, Previous)
            else self._current.get(edge)
            for edge in edges
        ]
        return [each for each in found if each is not None]

    def host_waits(self, edges: Iterable[Edge]) -> None:
        """Order what the host does next after the operations; a branch then reads its value."""
        for each in self._instances(edges):
            self._clocks.wait(self._host, each.mark)
        if self._branch is not None:
            branch, self._branch = self._branch, None
            tick = self._clocks.advance(self._host)
            if branch.value is not None:
                self._use(branch.value, self._host, tick, writes=False, name=branch.id)

    # Memory.

    def home_waits(
        self,
        home: str,
        buffer: str,
        uses: Iterable[Edge],
        drop: Callable[[], None],
        *,
        lent: bool = True,
    ) -> Sequence[Awaitable]:
        """Order the home after the uses; then the memory may be another buffer's."""
        line = self._lines[home]
        for each in self._instances(uses):
            self._follow(line, each)
        drop()
        self._free(line, buffer)
        return ()

    def _free(self, home: ClockTimeline, buffer: str) -> None:
        """Judge a free as a write: whoever gets the memory next on its home may write at once."""
        block = self._blocks.pop(buffer)
        tick = self._clocks.launch(self._host, home)
        if block.size:
            whole = self._contract.whole(block)
            access = RecordedAccess(home, tick, whole, writes=True, operation=f"free of {buffer}")
            self._contract.use(block, access)
        self._contract.drop(block, self._host)

    def finish(self, home: str, buffer: str, uses: Iterable[Edge]) -> Completion:
        """Give memory back once the uses that are named are over, which the home need not know."""
        block, line = self._blocks[buffer], self._lines[home]
        over = {(each.line.number, each.tick.time) for each in self._instances(uses)}
        seen = list(line.clock)
        for number, time in over:
            self._clocks.assume(line, Tick(number, time))
        self._free(line, block.label)
        line.clock[: len(seen)] = [
            now if number == line.number else before
            for number, (now, before) in enumerate(zip(line.clock, seen, strict=False))
        ]
        return lambda: True

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Nothing changes."""
        return nullcontext()

    def drain(self) -> None:
        """Order the host after everything."""
        for line in self._lines.values():
            self._clocks.follow(self._host, line)

    def end_step(self) -> None:
        """Let what ran serve `Previous` edges."""
        self._previous.update(self._current)
        self._current.clear()

    def events(self, origin: int) -> list[Event]:
        """Return nothing: there are no times here."""
        return []

    def forget(self) -> None:
        """Do nothing: there are no times here."""

    def follow_caller(self) -> None:
        """Do nothing: the caller is the host."""

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: nothing is read."""

    def now(self) -> int:
        """Return no time."""
        return 0


def hazards_of(
    schedule: Schedule,
    module: nn.Module,
    units: Sequence[UnitChoice],
    batches: Iterable[object],
    *,
    steps: int,
) -> list[Hazard]:
    """Run setup and steps of a schedule of one rank; return what nothing orders."""
    (program,) = schedule.programs
    device = torch.device("cpu")
    source = iter(batches)
    pools = HostPools(schedule, program, folder=Path(gettempdir()), device=device, poison=False)
    bench = Bench(schedule, program, rank=0, device=device, observer=None, pools=pools)
    streams = bench.streams = ClockedStreams(schedule)
    with emptied(module, keep=False) as taken, bench:
        executor = bench.executor(
            resolve(module, units),
            initial=taken.values.__getitem__,
            next_batch=lambda: next(source),
            on_loss=lambda loss: None,
            on_norm=lambda *_: None,
            on_issue=streams.issued,
            poison=Poison(None),
        )
        executor.run_setup()
        for step in range(steps):
            executor.run_step(step, {})
    pools.close()
    return list(streams.hazards)
