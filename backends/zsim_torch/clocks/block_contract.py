"""What allocators promise about blocks: when memory may be used again, and by whom.

PyTorch's caching allocator gives a block to the stream that is current when it is allocated, its
home. When its storage dies the block serves the next allocation with that home at once: kernels
there come later, but other streams may still be at work on it unless the home waited for them, or
`record_stream` was called (docs.pytorch.org, "torch.Tensor.record_stream" and "CUDA semantics",
memory management). Which block an allocation gets depends on sizes and history; here any freed
block of the home may be the one, which is the worst case.

The allocator of pinned memory knows the streams of copies that torch itself made, and holds a
block back until they are done; kernels that read pinned memory by its address it does not know.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from zsim_torch.clocks.access_history import AccessHistory, RecordedAccess
from zsim_torch.clocks.byte_region import ByteRegion
from zsim_torch.clocks.call_stack import CallStack
from zsim_torch.clocks.finding import BlockKind, BlockOrigin, Hazard, HazardKind, HazardList
from zsim_torch.clocks.stream_clock import ClockTimeline, StreamClocks


class FormerUse(NamedTuple):
    """The last use of a dropped block on some timeline."""

    access: RecordedAccess
    block: BlockOrigin


_Pool = dict[tuple[int, object], FormerUse]
"""Uses of dropped blocks of one home, the latest for each timeline and place of allocation."""


@dataclass(slots=True, eq=False)
class TrackedBlock:
    """Memory that is watched: a storage of a device or of the host, or a file."""

    label: str
    kind: BlockKind
    size: int
    home: ClockTimeline | None
    allocated: CallStack | None
    history: AccessHistory = field(default_factory=AccessHistory)
    last: dict[int, RecordedAccess] = field(default_factory=dict[int, RecordedAccess])
    """The latest access on each timeline."""
    recorded: set[int] = field(default_factory=set[int])
    """Timelines that the allocator knows of: it waits for them before it gives the memory on."""
    former: tuple[FormerUse, ...] = ()
    """Uses of dropped blocks whose memory this one may have."""

    def origin(self, dropped: CallStack | None = None) -> BlockOrigin:
        """Return what a finding says about the block."""
        home = self.home.name if self.home else ""
        return BlockOrigin(self.label, self.kind, self.size, home, self.allocated, dropped)


class BlockContract:
    """Blocks of memory, who uses them, and which uses nothing orders."""

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
        """Return a new block; on a device its `home` is the stream that is current."""
        block = TrackedBlock(label, kind, size, home, stack)
        if size and kind in {BlockKind.DEVICE, BlockKind.PINNED}:
            uses = self._pools.get(_pool_of(block), {}).values()
            # The latest first: the edge that it lacks orders the others too.
            block.former = tuple(sorted(uses, key=lambda use: use.access.tick.time, reverse=True))
        return block

    def use(
        self, block: TrackedBlock, access: RecordedAccess, *, known_to_allocator: bool = False
    ) -> None:
        """Note that `access` touches `block`, and every hazard of it.

        `known_to_allocator`: the allocator records the stream, as that of pinned memory does for
        copies of torch.
        """
        timeline = access.timeline
        is_first = timeline.number not in block.last
        for other in block.history.add(access):
            if not timeline.is_after(other.tick):  # the edge of a hazard before may order it
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
        """Tell the allocator that `timeline` uses `block`."""
        block.recorded.add(timeline.number)

    def drop(
        self, block: TrackedBlock, host: ClockTimeline, stack: CallStack | None = None
    ) -> None:
        """Give the memory back: its storage is dead.

        Uses that `host` has seen finished concern nobody any more.
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
        """Return all bytes of a block."""
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
