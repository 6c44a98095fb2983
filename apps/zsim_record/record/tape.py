"""The tape: accesses to streams, memory and communicators by a recorded script."""

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

from zsim.schedule.schedule import Schedule
from zsim_record.clocks.access_history import RecordedAccess
from zsim_record.clocks.block_contract import BlockContract, TrackedBlock
from zsim_record.clocks.byte_region import ByteRegion, region_of_view
from zsim_record.clocks.call_stack import CallStack, CallStacks, StackFrame
from zsim_record.clocks.finding import BlockKind, Hazard, HazardList
from zsim_record.clocks.stream_clock import ClockTimeline, StreamClocks, Tick
from zsim_record.lift.lifted_schedule import lift
from zsim_record.lift.step_events import LiftError, StepEvents

TORCH_FOLDER = str(Path(torch.__file__).parent)
_DISTRIBUTED = str(Path(TORCH_FOLDER) / "distributed")
_WRAPPERS = (TORCH_FOLDER, str(contextlib.__file__))
_DECORATORS = "typing_extensions.py"
_HIDDEN = (str(Path(__file__).parent), "<frozen")
_MACHINERY = tuple(
    str(Path(_DISTRIBUTED) / name) for name in ("distributed_c10d.py", "c10d_logger.py", "tensor")
)
SITE_FRAMES = 3
"""Number of innermost lines by which two code locations are compared."""

Item = bool | int | float | complex
"""A value that the host reads from a tensor."""


class UnrecordableError(RuntimeError):
    """The script does something that a recording does not support."""


def is_informative(frame: StackFrame) -> bool:
    """Return True if a line shows where something happened, not only torch's internals."""
    file = frame.file
    if file.startswith(_MACHINERY):
        return False
    if file.startswith(_DISTRIBUTED):
        return True
    return not file.startswith(_WRAPPERS) and not file.endswith(_DECORATORS)


def informative_frames(stack: CallStack | None) -> tuple[StackFrame, ...]:
    """Return the relevant lines of `stack`, the innermost first."""
    if stack is None:
        return ()
    frames = stack.frames
    return tuple(frame for frame in frames if is_informative(frame)) or frames


def site_of(stack: CallStack | None) -> tuple[StackFrame, ...]:
    """Return the innermost relevant lines of `stack`."""
    return informative_frames(stack)[:SITE_FRAMES]


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """A collective as this rank issued it."""

    kind: str
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    """Number of elements of its tensors, inputs before outputs."""
    dtype: str
    detail: str
    """Reduction or root, if it has one."""
    stack: CallStack


@dataclass(slots=True)
class Tape:
    """A recording, active or finished.

    `items` provides values that the script reads from tensors (`.item()`). It is called with the
    line that reads, and returns None for an unknown value; the value is then 1, and reported as
    made up.
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
    """By communicator name, in the order of issue."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Parts of the script that a recording does not see, with their counts."""
    invented: Counter[str] = field(default_factory=Counter[str])
    """Values that were made up, with their counts."""
    lifts: bool = False
    journal: StepEvents | None = field(init=False, default=None)
    """The events for a lift, if one is requested."""
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
        """Return the hazards found so far, each cause once."""
        return list(self.hazards)

    def stack(self) -> CallStack:
        """Return the Python stack of the script, without the recorder's frames."""
        return self.stacks.take(sys._getframe(1))

    def end_step(self) -> None:
        """End a training step here; after the first call, optimizer steps no longer end one."""
        if self.journal is not None:
            self.begin_operation()
            self.journal.end_step()

    def schedule(self, name: str = "recording") -> Schedule:
        """Return the repeated step of the recorded script, as a schedule of every rank.

        Raises:
            LiftError: steps differ, or a schedule cannot express them.
        """
        if self.journal is None:
            raise LiftError("the recording has no journal: ask for one, recording(lifts=True)")
        if self.hazards.assumes and len(self.hazards):
            raise LiftError("findings have to be mended first: their edges are taken to be there")
        self.begin_operation()
        return lift(self.journal, name=name, world=self.world, rank=self.rank)

    def refuse(self, what: str) -> UnrecordableError:
        """Record that `what` is not supported; return the error for callers that must stop."""
        where = site_of(self.stack())
        line = f"{what} at {where[0]}" if where else what
        self.refused[line] += 1
        return UnrecordableError(line)

    def invent(self, what: str) -> None:
        """Record that a value for the script was made up."""
        where = site_of(self.stack())
        self.invented[f"{what} at {where[0]}" if where else what] += 1

    def block(self, tensor: torch.Tensor, home: ClockTimeline | None = None) -> TrackedBlock | None:
        """Return the block that contains `tensor`; None for pageable memory, which has no races.

        Copies between a device and pageable memory are staged: the host has read the source when
        the call returns, and waits for the target (CUDA runtime API, "API synchronization
        behavior").
        """
        storage = tensor.untyped_storage()
        live = self._blocks.get(storage._cdata)
        if live is not None:
            return live.block
        if home is None and storage not in self._pinned:
            return None
        return self._track(storage, tensor, home)

    def pin(self, tensor: torch.Tensor) -> None:
        """Mark the memory of `tensor` as pinned."""
        storage = tensor.untyped_storage()
        if storage not in self._pinned:
            self._pinned.add(storage)
            self._track(storage, tensor, None)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is in pinned memory."""
        return tensor.untyped_storage() in self._pinned

    def resized(self, storage: torch.UntypedStorage, current: ClockTimeline) -> None:
        """Record a new size of `storage`: its old block is freed, and a new one is allocated."""
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
        """Record that an operation reads or writes the bytes of `tensor`."""
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
        """Queue a dead storage for release; garbage collection may call this at any time."""
        live = self._blocks.pop(key, None)
        if live is not None:
            self._dead.append((live, self.stack()))

    def begin_operation(self) -> None:
        """Release storages that died before this operation."""
        if self.journal is not None:
            self.journal.close()
        self.settle()

    def settle(self) -> None:
        """Release the memory of dead storages, before the next operation or allocation."""
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
        """Return the line to name a block by, or None; cached per stack."""
        if stack not in self._sites:
            self._sites[stack] = next(filter(is_informative, stack.frames), None)
        return self._sites[stack]


@dataclass(slots=True)
class _LiveStorage:
    reference: "weakref.ref[torch.UntypedStorage]"
    block: TrackedBlock


def region_of(tensor: torch.Tensor) -> ByteRegion | None:
    """Return the bytes of its storage that `tensor` covers."""
    return region_of_view(
        tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size()
    )


def elements(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each tensor."""
    return tuple(tensor.numel() for tensor in tensors)
