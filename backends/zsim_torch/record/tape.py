"""The tape: what a recorded script did to streams, memory and communicators."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import contextlib
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import zsim_torch
from zsim.schedule.schedule import Schedule
from zsim_torch.clocks.access_history import RecordedAccess
from zsim_torch.clocks.block_contract import BlockContract, TrackedBlock
from zsim_torch.clocks.byte_region import ByteRegion, region_of_view
from zsim_torch.clocks.call_stack import CallStack, CallStacks, StackFrame
from zsim_torch.clocks.finding import BlockKind, Hazard, HazardList
from zsim_torch.clocks.stream_clock import ClockTimeline, StreamClocks, Tick
from zsim_torch.lift.lifted_schedule import lift
from zsim_torch.lift.step_events import LiftError, StepEvents

TORCH_FOLDER = str(Path(torch.__file__).parent)
_DISTRIBUTED = str(Path(TORCH_FOLDER) / "distributed")
_WRAPPERS = (TORCH_FOLDER, str(contextlib.__file__))
_DECORATORS = "typing_extensions.py"
_HIDDEN = (str(Path(zsim_torch.__file__).parent / "record"), "<frozen")
_MACHINERY = tuple(
    str(Path(_DISTRIBUTED) / name) for name in ("distributed_c10d.py", "c10d_logger.py", "tensor")
)
SITE_FRAMES = 3
"""Innermost lines that tell one place from another."""

Item = bool | int | float | complex
"""A value that the host reads from a tensor."""


class UnrecordableError(RuntimeError):
    """The script does what a recording cannot follow."""


def is_telling(frame: StackFrame) -> bool:
    """Return whether a line says where something happened, and not only how torch got there."""
    file = frame.file
    if file.startswith(_MACHINERY):
        return False
    if file.startswith(_DISTRIBUTED):
        return True
    return not file.startswith(_WRAPPERS) and not file.endswith(_DECORATORS)


def telling_frames(stack: CallStack | None) -> tuple[StackFrame, ...]:
    """Return the lines of `stack` that a reader wants, the innermost first."""
    if stack is None:
        return ()
    frames = stack.frames
    return tuple(frame for frame in frames if is_telling(frame)) or frames


def site_of(stack: CallStack | None) -> tuple[StackFrame, ...]:
    """Return the innermost telling lines of `stack`."""
    return telling_frames(stack)[:SITE_FRAMES]


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """A collective as this rank handed it to its communicator."""

    kind: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    """Elements of its tensors, inputs before outputs."""
    dtype: str
    detail: str
    """Reduction or root, where there is one."""
    stack: CallStack


@dataclass(slots=True)
class Tape:
    """A recording under way, or over.

    `items` gives values that the script asks tensors for (`.item()`): it is called with the line
    that asks, and answers None where it does not know; then the value is 1, and said to be.
    """

    rank: int
    world: int
    items: Callable[[StackFrame], Item | None] | None = None
    clocks: StreamClocks = field(default_factory=StreamClocks)
    hazards: HazardList = field(init=False)
    contract: BlockContract = field(init=False)
    host: ClockTimeline = field(init=False)
    stacks: CallStacks = field(default_factory=lambda: CallStacks(_HIDDEN))
    collectives: dict[str, list[RecordedCollective]] = field(
        default_factory=dict[str, list[RecordedCollective]]
    )
    """For each communicator by its ranks and name, in the order of issue."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Parts of the script that a recording does not see, each with how often."""
    invented: Counter[str] = field(default_factory=Counter[str])
    """Values that were made up, each with how often."""
    lifts: bool = False
    journal: StepEvents | None = field(init=False, default=None)
    """The events that a lift needs, where one is asked for."""
    operation_count: int = 0
    peak_bytes: int = 0
    live_bytes: int = 0
    _blocks: dict[int, "_LiveStorage"] = field(default_factory=dict[int, "_LiveStorage"])
    _dead: "deque[tuple[_LiveStorage, CallStack]]" = field(default_factory=deque)
    _sites: dict[CallStack, StackFrame | None] = field(
        default_factory=dict[CallStack, StackFrame | None]
    )
    _pinned: "weakref.WeakSet[torch.UntypedStorage]" = field(default_factory=weakref.WeakSet)

    def __post_init__(self) -> None:
        self.hazards = HazardList(self.clocks, site_of)
        self.contract = BlockContract(self.clocks, self.hazards)
        self.host = self.clocks.host()
        if self.lifts:
            self.journal = StepEvents(self.host)

    @property
    def findings(self) -> list[Hazard]:
        """Hazards found so far, each cause once."""
        return list(self.hazards)

    def stack(self) -> CallStack:
        """Return the Python stack of the script, without that of the recorder."""
        return self.stacks.take(sys._getframe(1))

    def end_step(self) -> None:
        """Say that a step of training ends here; otherwise one ends with each optimizer step."""
        if self.journal is not None:
            self.begin_operation()
            self.journal.end_step()

    def schedule(self, name: str = "recording") -> Schedule:
        """Return the step that the recorded script repeats, as a schedule of every rank.

        Raises:
            LiftError: steps differ, or a schedule cannot say what they do.
        """
        if self.journal is None:
            raise LiftError("the recording has no journal: ask for one, recording(lifts=True)")
        if self.hazards.assumes and len(self.hazards):
            raise LiftError("findings have to be mended first: their edges are taken to be there")
        self.begin_operation()
        return lift(self.journal, name=name, world=self.world, rank=self.rank)

    def refuse(self, what: str) -> UnrecordableError:
        """Note that `what` cannot be recorded; return the error for where it must not go on."""
        where = site_of(self.stack())
        line = f"{what} at {where[0]}" if where else what
        self.refused[line] += 1
        return UnrecordableError(line)

    def invent(self, what: str) -> None:
        """Note that an answer to the script was made up."""
        where = site_of(self.stack())
        self.invented[f"{what} at {where[0]}" if where else what] += 1

    def block(self, tensor: torch.Tensor, home: ClockTimeline | None = None) -> TrackedBlock | None:
        """Return the block that `tensor` lies in; None for pageable memory, which has no races.

        Copies between a device and pageable memory are staged: the host has read what it gives, and
        waits for what it gets (CUDA runtime API, "API synchronization behavior").
        """
        storage = tensor.untyped_storage()
        live = self._blocks.get(storage._cdata)
        if live is not None:
            return live.block
        if home is None and storage not in self._pinned:
            return None
        return self._track(storage, tensor, home)

    def pin(self, tensor: torch.Tensor) -> None:
        """Make `tensor` lie in pinned memory."""
        storage = tensor.untyped_storage()
        if storage not in self._pinned:
            self._pinned.add(storage)
            self._track(storage, tensor, None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` lies in pinned memory."""
        return tensor.untyped_storage() in self._pinned

    def resized(self, storage: torch.UntypedStorage, current: ClockTimeline) -> None:
        """Note that `storage` has another size: its old block is gone, and it has a new one."""
        if self.journal is not None:
            self.journal.close()
        self.settle()
        live = self._blocks.pop(storage._cdata, None)
        if live is None:
            return
        stack = self.stack()
        self._drop(live, stack)
        if storage.nbytes():
            block = self.contract.allocate(
                live.block.label, live.block.kind, storage.nbytes(), home=current, stack=stack
            )
            self._blocks[storage._cdata] = _LiveStorage(live.reference, block)
            self._grow(block, stack)

    def note(
        self,
        tensor: torch.Tensor,
        timeline: ClockTimeline,
        tick: Tick,
        *,
        writes: bool,
        operation: str,
        stack: CallStack,
        home: ClockTimeline | None,
        known_to_allocator: bool = False,
    ) -> None:
        """Note that an operation reads or writes the bytes of `tensor`."""
        region = region_of(tensor)
        if region is None:
            return
        block = self.block(tensor, home)
        if block is not None:
            if self.journal is not None:
                self.journal.touch(
                    block,
                    timeline,
                    tick,
                    region,
                    writes=writes,
                    name=operation,
                    site=self._site(stack),
                )
            clock = tuple(timeline.clock)
            access = RecordedAccess(timeline, tick, region, writes, operation, stack, clock)
            self.contract.use(block, access, known_to_allocator=known_to_allocator)

    def _track(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, home: ClockTimeline | None
    ) -> TrackedBlock:
        self.settle()
        key = storage._cdata
        kind = BlockKind.PINNED if home is None else BlockKind.DEVICE
        label = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        stack = self.stack()
        block = self.contract.allocate(label, kind, storage.nbytes(), home=home, stack=stack)
        reference = weakref.ref(storage, lambda _: self._die(key))
        self._blocks[key] = _LiveStorage(reference, block)
        self._grow(block, stack)
        return block

    def _die(self, key: int) -> None:
        """Remember a dead storage. Garbage collection may call this amid anything."""
        live = self._blocks.pop(key, None)
        if live is not None:
            self._dead.append((live, self.stack()))

    def begin_operation(self) -> None:
        """Give back what died before an operation."""
        if self.journal is not None:
            self.journal.close()
        self.settle()

    def settle(self) -> None:
        """Give back the memory of storages that died: before the next operation or allocation."""
        while self._dead:
            self._drop(*self._dead.popleft())

    def _drop(self, live: "_LiveStorage", stack: CallStack) -> None:
        if live.block.kind is BlockKind.DEVICE:
            self.live_bytes -= live.block.size
        if self.journal is not None:
            self.journal.drop(live.block)
        self.contract.drop(live.block, self.host, stack)

    def _grow(self, block: TrackedBlock, stack: CallStack) -> None:
        if block.kind is BlockKind.DEVICE:
            self.live_bytes += block.size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self.journal is not None:
            self.journal.allocate(block, self.live_bytes, self._site(stack))

    def _site(self, stack: CallStack) -> StackFrame | None:
        """Return the line that a name shows, if one tells anything; equal stacks are one object."""
        if stack not in self._sites:
            self._sites[stack] = next(filter(is_telling, stack.frames), None)
        return self._sites[stack]


@dataclass(slots=True)
class _LiveStorage:
    reference: "weakref.ref[torch.UntypedStorage]"
    block: TrackedBlock


def region_of(tensor: torch.Tensor) -> ByteRegion | None:
    """Return the bytes of its storage that `tensor` shows."""
    return region_of_view(
        tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
    )


def elements(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each."""
    return tuple(tensor.numel() for tensor in tensors)
