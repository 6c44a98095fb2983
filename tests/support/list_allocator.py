"""A caching allocator that is slow and plain: lists of blocks, gone through from the start.

A second implementation of what `zsim.memory` says, to compare with. It keeps no index and no
running total: every search looks at every block, and every figure is counted anew after every
change. Of garbage collection it knows nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil

from memory_requests import Empty, Finish, Give, Request, Take, Use

from zsim.memory.settings import AllocatorSettings

KIB, MIB = 1024, 1024 * 1024


@dataclass(eq=False)
class Part:
    """A block, or unmapped pages: `name` is who has it, `waits` for which streams it waits."""

    size: int
    mapped: bool = True
    name: str | None = None
    asked: int = 0
    uses: list[str] = field(default_factory=list[str])
    waits: list[str] = field(default_factory=list[str])

    @property
    def free(self) -> bool:
        return self.mapped and self.name is None and not self.waits

    @property
    def active(self) -> bool:
        return self.name is not None or bool(self.waits)


@dataclass(eq=False)
class Segment:
    """What lies at addresses in a row; segments are listed by address."""

    stream: str
    small: bool
    parts: list[Part]
    expandable: bool = False

    @property
    def page(self) -> int:
        return 2 * MIB if self.small else 20 * MIB

    def start(self, part: Part) -> int:
        return sum(each.size for each in self.parts[: self.parts.index(part)])

    def join(self) -> None:
        """Free neighbours become one, and so do unmapped ones."""
        for one, two in pairwise(self.parts):
            if (one.free and two.free) or not (one.mapped or two.mapped):
                one.size += two.size
                self.parts.remove(two)
                return self.join()
        return None


class ListAllocator:
    """The allocator; `figures` are named as those of `CachingAllocator`."""

    def __init__(self, settings: AllocatorSettings, capacity: int) -> None:
        assert not settings.garbage_collection_threshold
        self.settings = settings
        self.capacity = capacity
        self.segments: list[Segment] = []
        self.waiting: list[Part] = []
        self.over: list[tuple[str, Part]] = []
        self.refused: list[str] = []
        self.peaks: dict[str, int] = {}
        self.counts = dict.fromkeys(
            (
                "num_alloc_retries",
                "num_ooms",
                "num_sync_all_streams",
                "num_device_alloc",
                "num_device_free",
            ),
            0,
        )
        self.look()

    def serve(self, requests: Iterable[Request]) -> None:
        for request in requests:
            match request:
                case Take():
                    self.take(request)
                case Use(name, stream):
                    if name not in self.refused:
                        for segment, part in self.named(name):
                            if stream not in (segment.stream, *part.uses):
                                part.uses.append(stream)
                case Give(name):
                    if name not in self.refused:
                        for segment, part in self.named(name):
                            part.name, part.waits, part.uses = None, part.uses, []
                            if part.waits:
                                self.waiting.append(part)
                            self.given_back(segment, part)
                case Finish(stream):
                    self.finish(stream)
                case Empty():
                    self.empty()

    def take(self, request: Take) -> None:
        if request.size_bytes == 0:
            return
        self.process()
        size = self.rounded(request.size_bytes)
        found = self.cached(request.stream, size) or self.fetched(request.stream, size)
        if found is None:
            self.counts["num_ooms"] += 1
            self.refused.append(request.name)
            return
        segment, part = found
        rest = part.size - size
        if segment.small or segment.expandable:
            splits = rest >= 512
        else:
            splits = rest > MIB and size < self.split_max
        if splits:
            part.size = size
            segment.parts.insert(segment.parts.index(part) + 1, Part(rest))
        part.name, part.asked = request.name, request.size_bytes
        self.look()

    def rounded(self, size: int) -> int:
        steps = self.settings.roundup_power2_divisions
        if steps > 1 and size > 512 * steps:
            floor = 1
            while 2 * floor <= size:
                floor *= 2
            return next(
                floor * (steps + step) // steps
                for step in range(steps + 1)
                if floor * (steps + step) // steps >= size
            )
        return ceil(size / 512) * 512

    @property
    def split_max(self) -> float:
        return self.settings.max_split_bytes or float("inf")

    def parts(self) -> Iterator[tuple[Segment, Part]]:
        return ((segment, part) for segment in self.segments for part in segment.parts)

    def named(self, name: str) -> list[tuple[Segment, Part]]:
        """The block of that name; none of a request of 0 bytes."""
        return [(segment, part) for segment, part in self.parts() if part.name == name]

    def cached(self, stream: str, size: int) -> tuple[Segment, Part] | None:
        small = size <= MIB
        free = [
            (segment, part)
            for segment, part in self.parts()
            if part.free
            and (segment.stream, segment.small) == (stream, small)
            and part.size >= size
        ]
        free.sort(key=lambda each: each[1].size)  # stable: by address among equals
        if not free:
            return None
        if self.settings.expandable_segments:
            reach = [part.size + self.unmapped_after(segment, part) for segment, part in free]
            place = 0
            while place + 1 < len(free) and reach[place + 1] < reach[place]:
                place += 1
            return free[place]
        first = free[0][1].size
        if size < self.split_max <= first:
            return None
        rounding = self.settings.max_non_split_rounding_bytes
        if size >= self.split_max and first >= size + rounding:
            return None
        return free[0]

    def unmapped_after(self, segment: Segment, part: Part) -> int:
        place = segment.parts.index(part) + 1
        following = segment.parts[place : place + 1]
        return sum(each.size for each in following if not each.mapped)

    def fetched(self, stream: str, size: int) -> tuple[Segment, Part] | None:
        found = self.grown(stream, size)
        if found is None and self.settings.max_split_bytes and self.oversize_returned(stream, size):
            found = self.grown(stream, size)
        if found is None:
            self.empty()
            self.counts["num_alloc_retries"] += 1
            found = self.grown(stream, size)
        return found

    def grown(self, stream: str, size: int) -> tuple[Segment, Part] | None:
        if self.settings.expandable_segments:
            return self.mapped(stream, size)
        if size <= MIB:
            segment_size = 2 * MIB
        elif size < 10 * MIB:
            segment_size = 20 * MIB
        else:
            segment_size = ceil(size / (2 * MIB)) * 2 * MIB
        if self.reserved() + segment_size > self.capacity:
            return None
        segment = Segment(stream, size <= MIB, [Part(segment_size)])
        self.segments.append(segment)
        self.counts["num_device_alloc"] += 1
        return segment, segment.parts[0]

    def mapped(self, stream: str, size: int) -> tuple[Segment, Part] | None:
        """Map the first unmapped pages of the lowest row that is large enough, and the next."""
        segment, row = self.row(stream, size)
        while True:
            part = row[0]
            if part.mapped and part.size >= size:
                return segment, part
            pages = row[1] if part.mapped else part
            missing = size - part.size if part.mapped else size
            amount = ceil(min(missing, pages.size) / segment.page) * segment.page
            if self.reserved() + amount > self.capacity:
                return None
            place = segment.parts.index(pages)
            address = segment.start(part)
            segment.parts[place : place + 1] = [
                Part(amount),
                *([Part(pages.size - amount, mapped=False)] if pages.size > amount else []),
            ]
            segment.join()
            self.counts["num_device_alloc"] += 1
            self.look()
            place = next(
                number
                for number, each in enumerate(segment.parts)
                if segment.start(each) + each.size > address
            )
            row = segment.parts[place:]

    def row(self, stream: str, size: int) -> tuple[Segment, list[Part]]:
        for segment in self.segments:
            if (segment.stream, segment.small) != (stream, size <= MIB):
                continue
            for place, part in enumerate(segment.parts):
                if part.mapped:
                    continue
                first = place - 1 if place and segment.parts[place - 1].free else place
                room = 0
                for each in segment.parts[first:]:
                    if each.active:
                        break
                    room += each.size
                if room >= size:
                    return segment, segment.parts[first:]
        segment = Segment(stream, size <= MIB, [], expandable=True)
        room = ceil((self.capacity + self.capacity // 8) / segment.page) * segment.page
        segment.parts.append(Part(room, mapped=False))
        self.segments.append(segment)
        return segment, segment.parts

    def given_back(self, segment: Segment, part: Part) -> None:
        """What waits for nobody is free."""
        if not part.waits:
            part.asked = 0
            segment.join()
        self.look()

    def finish(self, stream: str) -> None:
        for part in self.waiting:
            if stream in part.waits and (stream, part) not in self.over:
                self.over.append((stream, part))

    def process(self) -> None:
        for stream, part in self.over:
            (segment,) = (segment for segment, each in self.parts() if each is part)
            part.waits.remove(stream)
            if not part.waits:
                self.waiting.remove(part)
            self.given_back(segment, part)
        self.over.clear()

    def empty(self) -> None:
        self.counts["num_sync_all_streams"] += 1
        for stream in {stream: None for part in self.waiting for stream in part.waits}:
            self.finish(stream)
        self.process()
        for segment in list(self.segments):
            if segment.expandable:
                self.unmap(segment)
            elif len(segment.parts) == 1 and segment.parts[0].free:
                self.returned(segment)

    def returned(self, segment: Segment) -> None:
        self.segments.remove(segment)
        self.counts["num_device_free"] += 1
        self.look()

    def oversize_returned(self, stream: str, size: int) -> bool:
        least = max(size, self.split_max)
        whole = sorted(
            (
                segment
                for segment in self.segments
                if (segment.stream, segment.small) == (stream, size <= MIB)
                and segment.parts[0].free
                and segment.parts[0].size >= self.split_max
            ),
            key=lambda segment: segment.parts[0].size,
        )
        for segment in whole:
            if segment.parts[0].size >= least:
                self.returned(segment)
                return True
        amount = 0
        while amount < least and whole:
            segment = whole.pop()
            amount += segment.parts[0].size
            self.returned(segment)
        return amount >= least

    def unmap(self, segment: Segment) -> None:
        for part in [part for part in segment.parts if part.free]:
            start = segment.start(part)
            first = ceil(start / segment.page) * segment.page
            last = (start + part.size) // segment.page * segment.page
            if last <= first:
                continue
            place = segment.parts.index(part)
            pieces = (
                Part(first - start),
                Part(last - first, mapped=False),
                Part(start + part.size - last),
            )
            segment.parts[place : place + 1] = [piece for piece in pieces if piece.size]
            segment.join()
            self.counts["num_device_free"] += 1
            self.look()
        if not any(part.mapped for part in segment.parts):
            self.segments.remove(segment)

    def reserved(self) -> int:
        return sum(part.size for _, part in self.parts() if part.mapped)

    def current(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for pool in ("all", "small_pool", "large_pool"):
            segments = [
                segment
                for segment in self.segments
                if pool == "all" or segment.small is (pool == "small_pool")
            ]
            parts = [(segment, part) for segment in segments for part in segment.parts]
            live = [part for _, part in parts if part.name is not None]
            active = [part for _, part in parts if part.active]
            split = [
                part
                for segment, part in parts
                if part.free and len(segment.parts) > 1 and not segment.expandable
            ]
            found |= {
                f"allocation.{pool}": len(live),
                f"allocated_bytes.{pool}": sum(part.size for part in live),
                f"active.{pool}": len(active),
                f"active_bytes.{pool}": sum(part.size for part in active),
                f"requested_bytes.{pool}": sum(part.asked for part in active),
                f"inactive_split.{pool}": len(split),
                f"inactive_split_bytes.{pool}": sum(part.size for part in split),
                f"segment.{pool}": sum(not segment.expandable for segment in segments),
                f"reserved_bytes.{pool}": sum(part.size for _, part in parts if part.mapped),
            }
        return found

    def look(self) -> None:
        for name, value in self.current().items():
            self.peaks[name] = max(value, self.peaks.get(name, 0))

    def figures(self) -> dict[str, int]:
        current = {f"{name}.current": value for name, value in self.current().items()}
        return current | {f"{name}.peak": value for name, value in self.peaks.items()} | self.counts
