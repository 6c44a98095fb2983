"""Build the operations of a repeated step, and the buffers of its blocks."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import PurePath

from zsim.dtype import DType
from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Copy,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operand,
    Operation,
    Previous,
    Role,
    StreamOperation,
    View,
)
from zsim.schedule.schedule import Buffer, Kind
from zsim_record.clocks.call_stack import StackFrame
from zsim_record.lift.communicator_mesh import CommunicatorMesh
from zsim_record.lift.lifted_call import DTYPES, GATHERS, SCATTERS, CallPlace, collective
from zsim_record.lift.repeated_step import (
    BlockKey,
    EventPlace,
    OrderedEvent,
    RepeatedStep,
    in_order,
)
from zsim_record.lift.step_events import Allocation, CollectiveCall, Drop, Launch, LiftError, Touch

RUNS_MAX = 64
"""Views with more separate runs count as one from their first to their last element."""
Span = tuple[int, int]
"""Start and end (exclusive) in elements."""
DEVICE, PINNED = "device", "pinned"
"""Names of pools."""


@dataclass(slots=True)
class _Block:
    """A block with the accesses of a step."""

    name: str
    size: int
    home: int | None
    label: str
    on_wire: set[str] = field(default_factory=set[str])
    """Data types of collectives that access it."""
    own: tuple[int, int, str] | None = None
    """Start and size in bytes of the rank's own shard, and its axis."""
    touched: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def dtype(self) -> DType:
        if len(self.on_wire) > 1:
            formats = ", ".join(sorted(self.on_wire))
            raise LiftError(f"{self.name}: collectives take it in several formats: {formats}")
        named = next(iter(self.on_wire), self.label.partition("[")[0])
        dtype = DTYPES.get(named, DType.INT8)
        if self.size % dtype.size_bytes == 0:
            return dtype
        if self.on_wire:
            raise LiftError(f"{self.name}: {self.size} bytes are no whole number of {named}")
        return DType.INT8

    @property
    def is_used_whole(self) -> bool:
        end = 0
        for start, after in sorted(self.touched):
            if start > end:
                return False
            end = max(end, after)
        return end >= self.size


class LiftedStep:
    """Builds the operations of a repeated step, repeated so that each block keeps one name."""

    def __init__(self, step: RepeatedStep, mesh: CommunicatorMesh, rank: int) -> None:
        self.step = step
        self.mesh = mesh
        self.events = in_order(step)
        self._coordinates = mesh.mesh.coordinates(rank)
        self._ids = _names_of(step)
        self._blocks = self._found_blocks()

    def operations(self) -> list[Operation]:
        """Return the operations of a step of the schedule."""
        made: list[Operation] = []
        for turn in range(self.step.turns):
            for position, each in enumerate(self.events):
                made += self._made(each, position, turn)
        return made

    def buffers(self) -> list[tuple[Buffer, bool]]:
        """Return each buffer, and True if it is live between steps."""
        found: list[tuple[Buffer, bool]] = []
        last = self.step.turns - 1
        for key, block in self._blocks.items():
            kind = Kind.WORKSPACE if block.is_used_whole else Kind.COMMUNICATION
            if block.on_wire:
                kind = Kind.COMMUNICATION
            if key.lag is None:
                found.append((self._buffer(block, Kind.PARAMETER, block.name), True))
                continue
            stays = self.step.lifetimes[key.position].dropped.lag == 1
            for turn in range(self.step.turns):
                name = self._turn(block.name, turn)
                found.append((self._buffer(block, kind, name), stays and turn == last))
        return found

    def _buffer(self, block: _Block, kind: Kind, name: str) -> Buffer:
        on_device = block.home is not None
        streams = self.step.journal.streams
        home = streams.get(block.home) if block.home is not None else None
        return Buffer(
            name=name,
            pool=DEVICE if on_device else PINNED,
            elements=block.size // block.dtype.size_bytes,
            dtype=block.dtype,
            kind=kind,
            home=home or next(iter(streams.values())),
        )

    def _found_blocks(self) -> dict[BlockKey, _Block]:
        found: dict[BlockKey, _Block] = {}
        facts, seen = self.step.journal.blocks, Counter[str]()
        born = [each.event.block for each in self.events if isinstance(each.event, Allocation)]
        for number in (*self.step.permanent, *born):
            size, home, label, site = facts[number]
            name = f"{label}{_at(site)}"
            seen[name] += 1
            name += f" #{seen[name]}" if seen[name] > 1 else ""
            found[self.step.key(number)] = _Block(name, size, home, label)
        for each in self.events:
            if isinstance(each.event, Launch):
                for touch in each.event.touches:
                    region = touch.region
                    block = found.get(self._key(touch.block))
                    if block is not None:
                        block.touched += region.runs or ((region.start, region.end),)
                if each.event.call is not None:
                    self._note_call(found, each.event, each.event.call)
        return found

    def _key(self, number: int) -> BlockKey:
        """Return the key of a block, with its lag set to 0."""
        key = self.step.key(number)
        return key if key.lag is None else BlockKey(0, key.position)

    def _note_call(
        self, blocks: dict[BlockKey, _Block], launch: Launch, call: CollectiveCall
    ) -> None:
        for touch in launch.touches:
            blocks[self._key(touch.block)].on_wire.add(call.dtype)
        reads, writes = launch.touches[: call.reads], launch.touches[call.reads :]
        if call.kind not in GATHERS | SCATTERS:
            return
        for pair in zip(reads, writes, strict=False):
            part, whole = pair if call.kind in GATHERS else pair[::-1]
            if part.block == whole.block:
                size = part.region.end - part.region.start
                axis = self.mesh.axis(call.communicator)
                start = whole.region.start + self._coordinates[axis] * size
                if part.region.start == start:
                    own = (whole.region.start, size, axis)
                    blocks[self._key(part.block)].own = own

    def _made(self, each: OrderedEvent, position: int, turn: int) -> Iterator[Operation]:
        event, name = each.event, f"step/{turn}/{self._ids[position]}"
        for number, place in enumerate(each.host_waits):
            yield HostWait(id=f"{name}/wait{number}", operation=self._edge(place, turn))
        match event:
            case Launch():
                after = tuple(self._edge(place, turn) for place in each.after)
                yield self._launched(event, name, after, turn)
            case Allocation(block=block):
                yield Allocate(id=name, buffer=self._name(block, turn))
            case Drop(block=block, recorded=recorded):
                if self.step.key(block).lag is None:
                    label = self.step.journal.blocks[block].label
                    raise LiftError(
                        f"{label}: the step drops what an earlier one than the last took"
                    )
                mode = FreeMode.DEFERRED if recorded else FreeMode.WAITED
                edges = (self._edge(place, turn) for place in each.after)
                uses = tuple(edge for edge in edges if isinstance(edge, str))
                yield Free(id=name, buffer=self._name(block, turn), mode=mode, uses=uses)

    def _edge(self, place: EventPlace, turn: int) -> Edge:
        name = self._ids[place.position]
        if turn >= place.lag:
            return f"step/{turn - place.lag}/{name}"
        return Previous(f"step/{turn - place.lag + self.step.turns}/{name}")

    def _name(self, number: int, turn: int) -> str:
        key = self.step.key(number)
        block = self._blocks[self._key(number)]
        if key.lag is None:
            return block.name
        return self._turn(block.name, (turn - key.lag) % self.step.turns)

    def _turn(self, name: str, turn: int) -> str:
        return f"{name} turn {turn}" if self.step.turns > 1 else name

    def _launched(
        self, launch: Launch, name: str, after: tuple[Edge, ...], turn: int
    ) -> StreamOperation:
        streams = self.step.journal.streams
        if launch.timeline not in streams:
            raise LiftError(f"{launch.name} at {launch.site}: the host works on pinned memory")
        stream = streams[launch.timeline]
        if launch.call is not None:
            views = [self._views(each, turn, runs_max=0)[0] for each in launch.touches]
            group = self.mesh.groups[launch.call.communicator].name
            place = CallPlace(name, stream, after, group)
            split = launch.call.reads
            return collective(launch.call, place, views[:split], views[split:])
        homes = {self.step.journal.blocks[each.block].home for each in launch.touches}
        if launch.is_copy and None in homes:
            return self._copy(launch, CallPlace(name, stream, after, ""), turn)
        made = Role.INPUT_GRADIENT if launch.in_backward else Role.OUTPUT
        operands = dict.fromkeys(
            (made if writes else Role.INPUT, view)
            for writes, view in self._disjoint_views(launch.touches, turn)
        )
        return Compute(
            id=name,
            stream=stream,
            after=after,
            action=Action.BACKWARD if launch.in_backward else Action.FORWARD,
            micro_batch=turn,
            operands=tuple(Operand(role=role, view=view) for role, view in operands),
            kernels=() if launch.kernel is None else (launch.kernel,),
        )

    def _disjoint_views(self, touches: list[Touch], turn: int) -> Iterator[tuple[bool, View]]:
        """Yield the reads and writes of an operation as views that do not overlap.

        Elements that are both read and written count as written, which requires at least the same
        order.
        """
        own: dict[tuple[str, bool], View] = {}
        runs: dict[str, tuple[list[Span], list[Span]]] = {}
        for touch in touches:
            for view in self._views(touch, turn, runs_max=RUNS_MAX):
                if view.axis is not None:
                    own[view.buffer, touch.writes] = view
                else:
                    span = view.start, view.start + view.size
                    runs.setdefault(view.buffer, ([], []))[touch.writes].append(span)
        for (name, writes), view in own.items():
            if name not in runs and (writes or (name, True) not in own):
                yield writes, view
        for name, (read, written) in runs.items():
            ends = [*read, *written]
            pieces = cut(written, ends)
            for start, end in sorted({*cut(read, ends)}.difference(pieces)):
                yield False, View(buffer=name, start=start, size=end - start)
            for start, end in pieces:
                yield True, View(buffer=name, start=start, size=end - start)

    def _copy(self, launch: Launch, place: CallPlace, turn: int) -> Copy:
        views = [self._views(each, turn, runs_max=0)[0] for each in launch.touches]
        sources = [
            view for view, each in zip(views, launch.touches, strict=True) if not each.writes
        ]
        targets = [view for view, each in zip(views, launch.touches, strict=True) if each.writes]
        if len(sources) != 1 or len(targets) != 1:
            raise LiftError(
                f"{launch.name} at {launch.site}: copies with pageable memory at an end"
            )
        return Copy(
            id=place.id,
            stream=place.stream,
            after=place.after,
            source=sources[0],
            target=targets[0],
        )

    def _views(self, touch: Touch, turn: int, *, runs_max: int) -> list[View]:
        block, name = self._blocks[self._key(touch.block)], self._name(touch.block, turn)
        region, item = touch.region, block.dtype.size_bytes
        if block.own is not None:
            base, size, axis = block.own
            start = base + self._coordinates[axis] * size
            if start <= region.start and region.end <= start + size:
                return [View(buffer=name, start=base // item, size=size // item, axis=axis)]
        runs = region.runs if len(region.runs) <= runs_max else ()
        return [
            View(buffer=name, start=low // item, size=-(-high // item) - low // item)
            for low, high in runs or ((region.start, region.end),)
        ]


def cut(spans: Sequence[Span], bounds: Iterable[Span]) -> list[Span]:
    """Return the union of `spans`, cut at every start and end in `bounds`."""
    ends = sorted({end for span in bounds for end in span})
    pieces: set[Span] = set()
    for start, end in spans:
        low, high = bisect_left(ends, start), bisect_left(ends, end)
        pieces.update(pairwise(ends[low : high + 1]))
    return sorted(pieces)


def _at(site: StackFrame | None) -> str:
    return "" if site is None else f" {PurePath(site.file).name}:{site.line}"


def _names_of(step: RepeatedStep) -> list[str]:
    """Return a unique name for each event: operation, source line, and a number."""
    seen, found = Counter[str](), list[str]()
    blocks = step.journal.blocks
    for event in step.events:
        match event:
            case Launch(name=name, site=site):
                stem = f"{name.removeprefix('aten::')}{_at(site)}"
            case Allocation(block=block) | Drop(block=block):
                what = "allocate" if isinstance(event, Allocation) else "free"
                stem = f"{what} {blocks[block].label}{_at(blocks[block].site)}"
        seen[stem] += 1
        found.append(f"{stem} #{seen[stem]}")
    return found
