"""The journal of an allocator, change by change, and the statistics that PyTorch derives from it.

The allocator only records changes. Statistics are sums and maximum sums over them, computed on
request. They cost nothing while requests are served, and can be followed over time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from zsim.memory.settings import SMALL_MAX_BYTES

Change = tuple[int, int, int, int]
"""A block that becomes active (positive) or inactive: its bytes, the requested bytes, and the
change in bytes and in number of free parts of split segments.
"""

POOLS = ("all", "small_pool", "large_pool")


class Moment(NamedTuple):
    """Bytes reserved from the device, and bytes of these in active blocks."""

    reserved_bytes: int
    active_bytes: int


@dataclass(slots=True)
class Journal:
    """Changes in the order in which they occurred.

    A block belongs to the small pool if it has at most `SMALL_MAX_BYTES`: blocks of the small pool
    are exactly as large as their rounded request, and blocks of the large pool always exceed the
    limit.

    Attributes:
        changes: of blocks.
        held: a freed block that a stream still uses is active but not allocated. Each entry has the
            number of changes before it and the bytes: negative at the free, positive at the
            release.
        segments: number of changes before, bytes and number of segments allocated from the device
            (negative: returned), and True if for the small pool. Pages mapped into expandable
            segments count as bytes only.
        expandable: True for expandable segments, whose free parts do not count as split.
    """

    expandable: bool
    changes: list[Change] = field(default_factory=list[Change])
    held: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    segments: list[tuple[int, int, int, bool]] = field(
        default_factory=list[tuple[int, int, int, bool]]
    )

    def moments(self) -> Iterator[Moment]:
        """Yield the reserved and active bytes after each change of either."""
        blocks = ((place + 1, 0, change[0]) for place, change in enumerate(self.changes))
        segments = ((place, change, 0) for place, change, _, _ in self.segments)
        reserved = active = 0
        for _, of_reserved, of_active in merge(blocks, segments, key=itemgetter(0)):
            reserved += of_reserved
            active += of_active
            yield Moment(reserved, active)

    def figures(self) -> dict[str, int]:
        """Return current and peak values by their names in `torch.cuda.memory_stats`."""
        found: dict[str, int] = {}
        for pool in POOLS:
            for name, series in self._series(pool):
                sums = list(accumulate(series, initial=0))
                found[f"{name}.{pool}.current"] = sums[-1]
                found[f"{name}.{pool}.peak"] = max(sums)
        return found

    def _series(self, pool: str) -> Iterator[tuple[str, Iterable[int]]]:
        """Yield the name and the changes of each statistic of a pool."""
        changes, allocated = self._of(pool)
        split = [] if self.expandable else changes
        yield "active_bytes", [change[0] for change in changes]
        yield "active", [1 if change[0] > 0 else -1 for change in changes]
        yield "allocated_bytes", allocated
        yield "allocation", [1 if change > 0 else -1 for change in allocated]
        yield "requested_bytes", [change[1] for change in changes]
        yield "inactive_split_bytes", [change[2] for change in split]
        yield "inactive_split", [change[3] for change in split]
        segments = [each for each in self.segments if pool == "all" or each[3] is _small(pool)]
        yield "reserved_bytes", [each[1] for each in segments]
        yield "segment", [each[2] for each in segments]

    def _of(self, pool: str) -> tuple[list[Change], list[int]]:
        """Return changes of the active blocks of a pool, and of its allocated bytes."""
        changes = self.changes
        if pool != "all":
            small = _small(pool)
            changes = [each for each in changes if (abs(each[0]) <= SMALL_MAX_BYTES) is small]
        if not self.held:
            return changes, [change[0] for change in changes]
        blocks = ((place + 1, each[0]) for place, each in enumerate(self.changes))
        everything = (change for _, change in merge(blocks, self.held, key=itemgetter(0)))
        if pool == "all":
            return changes, list(everything)
        small = _small(pool)
        return changes, [each for each in everything if (abs(each) <= SMALL_MAX_BYTES) is small]


def _small(pool: str) -> bool:
    return pool == "small_pool"
