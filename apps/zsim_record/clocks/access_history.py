"""Reads and writes of a memory block that later accesses could still race with."""

from collections.abc import Iterator
from typing import NamedTuple

from zsim_record.clocks.byte_region import ByteRegion
from zsim_record.clocks.call_stack import CallStack
from zsim_record.clocks.stream_clock import ClockTimeline, Tick


class RecordedAccess(NamedTuple):
    """A read or write of bytes by one operation of a timeline."""

    timeline: ClockTimeline
    tick: Tick
    region: ByteRegion
    writes: bool
    operation: str
    stack: CallStack | None = None
    clock: tuple[int, ...] = ()
    """The timeline's clock at the access: a wait for this access inherits it."""


class AccessHistory:
    """Accesses to one block, without those that a later access supersedes."""

    __slots__ = ("_accesses",)

    def __init__(self) -> None:
        self._accesses: dict[tuple[int, bool, ByteRegion], RecordedAccess] = {}

    def __iter__(self) -> Iterator[RecordedAccess]:
        return iter(self._accesses.values())

    def add(self, access: RecordedAccess) -> list[RecordedAccess]:
        """Add `access`.

        Return earlier accesses that conflict with it and are not ordered before it.
        """
        timeline, region, writes = access.timeline, access.region, access.writes
        number = timeline.number
        unordered: list[RecordedAccess] = []
        superseded: list[tuple[int, bool, ByteRegion]] = []
        for key, other in self._accesses.items():
            if other.timeline is not timeline and not timeline.is_after(other.tick):
                if (writes or other.writes) and region.overlaps(other.region):
                    unordered.append(other)
            elif (writes or (not other.writes and key[0] == number)) and region.contains(
                other.region
            ):
                superseded.append(key)
        for key in superseded:
            del self._accesses[key]
        self._accesses[number, writes, region] = access
        return unordered
