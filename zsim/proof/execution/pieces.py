"""Cuts every tensor at the ends of all views of all ranks; between two cuts is one exact number.

Elements are counted in spaces: each layout is one (its shards are parts of it), each buffer
without a layout, each parameter, and each value that flows between segments. A link states that
elements of two spaces are the same, or are combined one by one: a cut of one is a cut of the
other.
"""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

NUMBERS = re.compile(r"\d+")

Key = tuple[str, ...]
"""The name of a space, which starts with its kind."""


class Space:
    """Elements that are cut; `starts` and `sizes` of the pieces are available after `close`."""

    def __init__(self, key: Key, size: int) -> None:
        self.key = key
        self.size = size
        self.cuts: set[int] = {0, size}
        self.left_out: set[int] = set()
        self.bounds: set[int] = set()
        self.stands_for: dict[int, int] = {}
        self.starts: Integers = np.zeros(0, np.int64)
        self.sizes: Integers = np.zeros(0, np.int64)
        self.weights: Integers = np.zeros(0, np.int64)

    def close(self) -> None:
        """Assign numbers to the pieces that are not in `left_out`.

        A piece that represents those of several ranks has their number as its weight.
        """
        cuts = np.array(sorted(self.cuts), np.int64)
        starts, sizes = cuts[:-1], np.diff(cuts)
        if self.left_out:
            kept = ~np.isin(starts, np.array(list(self.left_out), np.int64))
            starts, sizes = starts[kept], sizes[kept]
        self.starts, self.sizes = starts, sizes
        self.weights = np.ones(len(starts), np.int64)
        if self.stands_for:
            known = self.stands_for
            self.weights = np.array([known.get(start, 1) for start in starts.tolist()], np.int64)

    @property
    def count(self) -> int:
        """The number of pieces."""
        return len(self.starts)

    def inside(self, low: int, high: int) -> tuple[int, int]:
        """Return the numbers of the first piece in [low, high), and of the first one past it."""
        first, end = np.searchsorted(self.starts, (low, high))
        return int(first), int(end)


class Spaces:
    """All spaces of a schedule, and the links between them.

    With `merges`, spaces of one size whose names differ only in numbers, such as those of equal
    layers, are one space. Each is then cut wherever another one is, which is sound, and found only
    once.
    """

    def __init__(self, *, merges: bool) -> None:
        self.merges = merges
        self.by_key: dict[Key, Space] = {}
        self.distinct: dict[Key, Space] = {}
        self._links: dict[Key, set[tuple[int, Key, int, int, bool]]] = defaultdict(set)
        self._parts: dict[Key, set[tuple[int, int, tuple[tuple[int, int, int], ...]]]] = (
            defaultdict(set)
        )

    def space(self, key: Key, size: int) -> Space:
        """Return a space; the first call creates it."""
        found = self.by_key.get(key)
        if found is None:
            alike = (*key[:-1], NUMBERS.sub("#", key[-1]), str(size)) if self.merges else key
            found = self.by_key[key] = self.distinct.setdefault(alike, Space(alike, size))
        if size > found.size:
            found.cuts.add(size)
            found.size = size
        return found

    def cut(self, key: Key, *places: int) -> None:
        """Cut a space at `places`."""
        self.by_key[key].cuts.update(places)

    def link(
        self, one: tuple[Key, int], other: tuple[Key, int], size: int, *, own: bool = False
    ) -> None:
        """Link `size` elements from two places on, and cut at the ends of both.

        With `own`, each rank keeps its part of one space in the other: they only have the same
        cuts.
        """
        if not size:
            return
        here, there = self.by_key[one[0]], self.by_key[other[0]]
        here.cuts.update((one[1], one[1] + size))
        there.cuts.update((other[1], other[1] + size))
        if here is not there or one[1] != other[1]:
            self._links[here.key].add((one[1], there.key, other[1], size, own))
            self._links[there.key].add((other[1], here.key, one[1], size, own))

    def split(self, key: Key, low: int, high: int, parts: tuple[tuple[int, int, int], ...]) -> None:
        """Split [low, high) into parts of ranks, only some of which are run.

        Args:
            key: of the space.
            low: start of the parts.
            high: end of the parts.
            parts: start and end of each part that is run, ascending, and the number of ranks that
                it represents.
        """
        if (low, high, parts) in self._parts[key]:
            return
        self._parts[key].add((low, high, parts))
        cuts = self.by_key[key].cuts
        cuts |= {low, high}
        for start, end, _ in parts:
            cuts |= {start, end}

    def cuts_what_is_left_out(self) -> bool:
        """Return True if a view of all ranks starts or ends inside omitted parts.

        Such a view distinguishes ranks that are represented by one.
        """
        for space in self.distinct.values():
            if space.left_out and space.bounds:
                cuts = sorted(space.cuts)
                for place in space.bounds & space.left_out:
                    before = bisect_left(cuts, place) - 1
                    if before >= 0 and cuts[before] in space.left_out:
                        return True
        return False

    def _leave_out(self) -> None:
        """Omit the parts of ranks that are not run, and all elements linked to them."""
        out: dict[Key, set[int]] = {}
        weights: dict[Key, dict[int, int]] = {}
        for key, splits in self._parts.items():
            space = self.by_key[key]
            cuts = sorted(space.cuts)
            for low, high, parts in splits:
                ends = [(low, low, 1), *parts, (high, high, 1)]
                for (_, start, _), (end, _, _) in pairwise(ends):
                    places = cuts[bisect_left(cuts, start) : bisect_left(cuts, end)]
                    space.left_out.update(places)
                    out.setdefault(key, set()).update(places)
                for start, end, ranks in parts:
                    if ranks > 1:
                        places = cuts[bisect_left(cuts, start) : bisect_left(cuts, end)]
                        for place in places:
                            known = space.stands_for.get(place, 1)
                            space.stands_for[place] = max(known, ranks)
                        weights.setdefault(key, {}).update(
                            (place, space.stands_for[place]) for place in places
                        )
        while out or weights:
            key = next(iter(out or weights))
            gone, heavy = out.pop(key, set()), weights.pop(key, {})
            ordered = sorted(gone | heavy.keys())
            for start, other, there, size, own in self._links[key]:
                if own:
                    continue
                target = self.distinct[other]
                first = bisect_left(ordered, start)
                for place in ordered[first : bisect_left(ordered, start + size)]:
                    moved = place - start + there
                    if place in gone and moved not in target.left_out:
                        target.left_out.add(moved)
                        out.setdefault(other, set()).add(moved)
                    if place in heavy and target.stands_for.get(moved, 1) < heavy[place]:
                        target.stands_for[moved] = heavy[place]
                        weights.setdefault(other, {})[moved] = heavy[place]

    def close(self) -> None:
        """Propagate every cut over all links until there are no new ones, and number the pieces."""
        waiting: dict[Key, set[int]] = {
            key: set(space.cuts) for key, space in self.distinct.items() if key in self._links
        }
        while waiting:
            key, new = waiting.popitem()
            ordered = sorted(new)
            for start, other, there, size, _ in self._links[key]:
                inside = ordered[bisect_right(ordered, start) : bisect_left(ordered, start + size)]
                moved = {place - start + there for place in inside}
                known = self.distinct[other].cuts
                if not moved <= known:
                    waiting.setdefault(other, set()).update(moved - known)
                    known |= moved
        self._leave_out()
        for space in self.distinct.values():
            space.close()
