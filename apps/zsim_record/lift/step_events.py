"""Events of a recording for its lift: operations, memory and ends of steps, in host order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from zsim.model.kernel import Kernel
from zsim_record.clocks.block_contract import TrackedBlock
from zsim_record.clocks.byte_region import ByteRegion
from zsim_record.clocks.call_stack import StackFrame
from zsim_record.clocks.stream_clock import ClockTimeline, Tick


class LiftError(ValueError):
    """A recording that no schedule can express; the message names the reason."""


class Touch(NamedTuple):
    """A read or a write of a byte region of a block."""

    block: int
    region: ByteRegion
    writes: bool


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A recorded call of a collective; the first `reads` touches of its launch are reads.

    `sizes` are the elements of each tensor that it reads, followed by those that it writes.
    """

    kind: str
    communicator: str
    ranks: tuple[int, ...]
    dtype: str
    reduction: str
    root: int | None
    reads: int
    sizes: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Launch:
    """An operation on a timeline: its time, clock and accesses, and the clock of the host."""

    timeline: int
    time: int
    clock: tuple[int, ...]
    host: tuple[int, ...]
    name: str
    site: StackFrame | None
    touches: list[Touch] = field(default_factory=list[Touch])
    kernel: Kernel | None = None
    call: CollectiveCall | None = None
    in_backward: bool = False
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation of a block; `live_bytes` of the device are in use afterwards."""

    block: int
    host: tuple[int, ...]
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The free of a storage; `uses` are the last uses by streams other than its home.

    The allocator waits for the uses in `recorded`, from `record_stream`.
    """

    block: int
    host: tuple[int, ...]
    uses: tuple[Tick, ...]
    recorded: tuple[Tick, ...]


Event = Launch | Allocation | Drop


class BlockFacts(NamedTuple):
    """Properties of a block at its allocation; `home` is None for pinned memory."""

    size: int
    home: int | None
    label: str
    site: StackFrame | None


class StepEvents:
    """Events in host order, divided into steps.

    The results of an operation are allocated while it is being recorded. Allocations and drops
    before `close` are inserted before the operation.
    """

    def __init__(self, host: ClockTimeline) -> None:
        self._host = host
        self.steps: list[list[Event]] = [[]]
        self.blocks: list[BlockFacts] = []
        self.streams: dict[int, str] = {}
        self.unliftable: list[str] = []
        """Operations that no schedule can express."""
        self._numbers: dict[TrackedBlock, int] = {}
        self._open: Launch | None = None
        self._are_optimizers = True

    def close(self) -> None:
        """Finish the last operation."""
        self._open = None

    def end_step(self, *, by_optimizer: bool = False) -> None:
        """End a step; after the first explicit call, optimizers no longer end steps."""
        self.close()
        if by_optimizer and not self._are_optimizers:
            return
        if not by_optimizer and self._are_optimizers:
            self._are_optimizers = False
            self.steps = [[each for step in self.steps for each in step]]
        self.steps.append([])

    @property
    def host(self) -> int:
        """Return the number of the host's timeline."""
        return self._host.number

    def allocate(self, block: TrackedBlock, live_bytes: int, site: StackFrame | None) -> None:
        """Record the allocation of `block`."""
        if block.size:
            number = self._numbers[block] = len(self.blocks)
            home = None if block.home is None else block.home.number
            self.blocks.append(BlockFacts(block.size, home, block.label, site))
            self._insert(Allocation(number, tuple(self._host.clock), live_bytes))

    def drop(self, block: TrackedBlock) -> None:
        """Record the free of the storage in `block`."""
        number = self._numbers.pop(block, None)
        if number is not None:
            home = None if block.home is None else block.home.number
            ticks = {each: last.tick for each, last in block.last.items() if each != home}
            recorded = tuple(ticks[each] for each in ticks if each in block.recorded)
            uses = tuple(ticks[each] for each in ticks if each not in block.recorded)
            self._insert(Drop(number, tuple(self._host.clock), uses, recorded))

    def _insert(self, event: Allocation | Drop) -> None:
        # Frees right after the end of a step, as in zero_grad(), belong to that step.
        is_behind = isinstance(event, Drop) and not self.steps[-1] and len(self.steps) > 1
        step = self.steps[-2 if is_behind else -1]
        step.insert(len(step) - (self._open is not None), event)

    def touch(
        self,
        block: TrackedBlock,
        timeline: ClockTimeline,
        tick: Tick,
        region: ByteRegion,
        *,
        writes: bool,
        name: str,
        site: StackFrame | None,
    ) -> None:
        """Record that the operation at `tick` accesses a region of a block."""
        launch = self._open
        if launch is None or (launch.timeline, launch.time) != tick:
            if not timeline.is_host:
                self.streams.setdefault(timeline.number, timeline.name)
            known = tuple(timeline.clock)
            launch = Launch(tick.timeline, tick.time, known, tuple(self._host.clock), name, site)
            self.steps[-1].append(launch)
            self._open = launch
        launch.touches.append(Touch(self._numbers[block], region, writes))

    def describe(self, kernel: Kernel, *, in_backward: bool, is_copy: bool) -> None:
        """Set the cost of the last operation, and whether it is in backward or a copy."""
        if self._open is not None:
            self._open.kernel = kernel
            self._open.in_backward = in_backward
            self._open.is_copy = is_copy

    def collective(self, call: CollectiveCall) -> None:
        """Mark the last operation as a collective."""
        if self._open is None or len(self._open.touches) != len(call.sizes):
            self.unliftable.append(f"{call.kind}: it has a tensor that is empty, or on the CPU")
        else:
            self._open.call = call


def ordered(first: Sequence[int], tick: Tick) -> bool:
    """Return True if the clock `first` includes `tick`."""
    return tick.timeline < len(first) and first[tick.timeline] >= tick.time
