"""Contracts of allocators: when, and on which stream, freed memory may be reused.

PyTorch's caching allocator assigns a block to the current stream at its allocation: its home. When
its storage is freed, the next allocation on the same home may get the block at once. Kernels of the
home run later, but other streams may still use the block unless the home waited for them, or
`record_stream` was called (docs.pytorch.org, "torch.Tensor.record_stream" and "CUDA semantics",
memory management). Which block an allocation gets depends on sizes and history. The detector
assumes the worst case: any freed block of the home.

The pinned memory allocator tracks the streams of torch's own copies, and holds a block back until
they finish. It does not track kernels that read pinned memory by its address.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from zsim_record.clocks.access_history import AccessHistory, RecordedAccess
from zsim_record.clocks.byte_region import ByteRegion
from zsim_record.clocks.call_stack import CallStack
from zsim_record.clocks.finding import BlockKind, BlockOrigin, Hazard, HazardKind, HazardList
from zsim_record.clocks.stream_clock import ClockTimeline, StreamClocks


class FormerUse(NamedTuple):
    """The last use of a freed block on some timeline."""

    access: RecordedAccess
    block: BlockOrigin


_Pool = dict[tuple[int, object], FormerUse]
"""Uses of freed blocks of one home: the latest per timeline and allocation stack."""


@dataclass(slots=True, eq=False)
class TrackedBlock:
    """A memory block under observation: a storage of a device or the host, or a file."""

    label: str
    kind: BlockKind
    size: int
    home: ClockTimeline | None
    allocated: CallStack | None
    history: AccessHistory = field(default_factory=AccessHistory)
    last: dict[int, RecordedAccess] = field(default_factory=dict[int, RecordedAccess])
    """The latest access on each timeline."""
    recorded: set[int] = field(default_factory=set[int])
    """Timelines that the allocator tracks: it waits for them before it reuses the memory."""
    former: tuple[FormerUse, ...] = ()
    """Uses of freed blocks whose memory this block may have."""

    def origin(self, dropped: CallStack | None = None) -> BlockOrigin:
        """Return the description of the block for a hazard."""
        home = self.home.name if self.home else ""
        return BlockOrigin(self.label, self.kind, self.size, home, self.allocated, dropped)


class BlockContract:
    """Blocks of memory and their uses; reports uses that no edge orders."""

    def __init__(self, clocks: StreamClocks, hazards: HazardList) -> None:
        self._clocks = clocks
        self._hazards = hazards
        self._pools: dict[tuple[BlockKind, int], _Pool] = {}

    def allocate(
        self,
        label: str,
        kind: BlockKind,
        size: int,
        *,
        home: ClockTimeline | None = None,
        stack: CallStack | None = None,
    ) -> TrackedBlock:
        """Return a new block; on a device, its `home` is the current stream."""
        block = TrackedBlock(label, kind, size, home, stack)
        if size and kind in {BlockKind.DEVICE, BlockKind.PINNED}:
            uses = self._pools.get(_pool_of(block), {}).values()
            # The latest first: an edge to it orders the others, too.
            block.former = tuple(sorted(uses, key=lambda use: use.access.tick.time, reverse=True))
        return block

    def use(
        self, block: TrackedBlock, access: RecordedAccess, *, known_to_allocator: bool = False
    ) -> None:
        """Record that `access` touches `block`, and report all its hazards.

        `known_to_allocator` is True if the allocator tracks the stream, as the pinned memory
        allocator does for torch's copies.
        """
        timeline = access.timeline
        is_first = timeline.number not in block.last
        for other in block.history.add(access):
            if not timeline.is_after(other.tick):  # an edge assumed before may order it
                hosts = timeline.is_host or other.timeline.is_host
                kind = HazardKind.HOST_RACE if hosts else HazardKind.RACE
                self._hazards.add(
                    Hazard(kind, other, access, block.origin(), last_wait=_last_wait(other, access))
                )
        if is_first:
            for former in block.former:
                self._need_order(block, former, access)
        block.last[timeline.number] = access
        if known_to_allocator:
            block.recorded.add(timeline.number)

    def record_stream(self, block: TrackedBlock, timeline: ClockTimeline) -> None:
        """Make the allocator track the use of `block` on `timeline`."""
        block.recorded.add(timeline.number)

    def drop(
        self, block: TrackedBlock, host: ClockTimeline, stack: CallStack | None = None
    ) -> None:
        """Free the block when its storage is released.

        Uses that `host` has seen finish are dropped.
        """
        if block.kind not in {BlockKind.DEVICE, BlockKind.PINNED}:
            return
        origin = block.origin(stack)
        pool = self._pools.setdefault(_pool_of(block), {})
        for key in [key for key, use in pool.items() if host.is_after(use.access.tick)]:
            del pool[key]
        for access in block.last.values():
            if access.timeline.number in block.recorded or host.is_after(access.tick):
                continue
            key = access.timeline.number, block.allocated
            if key not in pool or pool[key].access.tick < access.tick:
                pool[key] = FormerUse(access, origin)
        block.last = {}

    def whole(self, block: TrackedBlock) -> ByteRegion:
        """Return the region of all bytes of a block."""
        return ByteRegion(0, block.size)

    def _need_order(self, block: TrackedBlock, former: FormerUse, access: RecordedAccess) -> None:
        if access.timeline.is_host and former.access.timeline.is_host:
            return
        if former.access.timeline is access.timeline or access.timeline.is_after(
            former.access.tick
        ):
            return
        self._hazards.add(
            Hazard(
                HazardKind.REUSE,
                former.access,
                access,
                block.origin(),
                former.block,
                _last_wait(former.access, access),
            )
        )


def _pool_of(block: TrackedBlock) -> tuple[BlockKind, int]:
    return block.kind, block.home.number if block.home else -1


def _last_wait(earlier: RecordedAccess, later: RecordedAccess) -> CallStack | None:
    return later.timeline.waits.get(earlier.timeline.number)
