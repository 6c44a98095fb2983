"""Order across steps: whether an operation starts after all earlier instances of another one.

A stream runs in order, so whatever is ordered after the last instance of an operation is ordered
after all. At the start of a step, the following may be ordered after it (its holders): the host,
each stream, the last instance of an operation that others wait for, and the last operation on each
communicator. A step passes this knowledge from holder to holder, depending only on the lists that
it takes. So a set of holders summarizes the past of one operation. Every set that some sequence of
steps, each on any path, can leave is computed and tested. That is exact: an answer holds for any
number of steps and all their paths, and if it is no, some of them leave the two without an order.
Sets that contain another set are skipped: more holders pass on more.

Cost: one pass over each path; for an operation, its different sets, mostly one or two, at most
`SETS_MAX`. With more, nothing counts as known.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import or_

from zsim.schedule.happens_before import BranchPath, Clock, Timeline
from zsim.schedule.operation import Allocate, Free, FreeMode
from zsim.schedule.program_index import HOST, Numbered

SETS_MAX = 1000
"""Maximum number of sets of holders for one operation."""

Holders = int
"""A set of holders: bit 0 is the host, then streams, awaited operations, communicators."""


@dataclass
class StepSummary:
    """The effect of one path through a step on holders.

    `known` holds, for each operation that runs, the holders whose knowledge it has at its start.
    At the end of the step, each holder has the knowledge of `sources`, and of this step that of
    `clocks`.
    """

    known: list[Holders]
    sources: list[Holders]
    clocks: list[Clock | None]
    _handed: dict[Holders, Holders] = field(default_factory=dict[Holders, Holders])
    _knowing: dict[int, tuple[list[int], list[Holders]]] = field(
        default_factory=dict[int, tuple[list[int], list[Holders]]]
    )

    @cached_property
    def _kept(self) -> tuple[Holders, list[tuple[Holders, Holders]]]:
        """Holders that keep only their own knowledge, and the other holders by their sources."""
        kept, by_sources = 0, dict[Holders, Holders]()
        for at, sources in enumerate(self.sources):
            if sources == 1 << at:
                kept |= sources
            else:
                by_sources[sources] = by_sources.get(sources, 0) | 1 << at
        return kept, list(by_sources.items())

    def handed_on(self, holders: Holders) -> Holders:
        """Return the holders that have, at the end, the knowledge of `holders` at the start."""
        found = self._handed.get(holders)
        if found is None:
            kept, by_sources = self._kept
            found = holders & kept
            for sources, heirs in by_sources:
                if sources & holders:
                    found |= heirs
            self._handed[holders] = found
        return found

    def knowing(self, stream: int, position: int) -> Holders:
        """Return the holders that know this step's operations on a stream up to a position."""
        if stream not in self._knowing:
            upto: dict[int, Holders] = {}
            for at, clock in enumerate(self.clocks):
                if clock is not None:
                    upto[clock[stream]] = upto.get(clock[stream], 0) | 1 << at
            places = sorted(upto)
            sets = list(accumulate((upto[place] for place in reversed(places)), or_))
            self._knowing[stream] = places, [*reversed(sets), 0]
        places, sets = self._knowing[stream]
        return sets[bisect_left(places, position)]


@dataclass(frozen=True, slots=True)
class _Fork:
    """Knowledge on the last path to a branch: of operations, host, streams and groups."""

    known: list[Holders]
    host: Holders
    tails: list[Holders]
    latest: dict[str, Holders]


class StepBoundary:
    """Knowledge that the operations of a step have of earlier steps."""

    def __init__(self, order: Timeline) -> None:
        self.order = order
        self.numbered: Numbered = order.numbered
        awaited = {name for names in self.numbered.previous.values() for name in names}
        groups = {self.numbered.group[number] for number in self.numbered.communications}
        first = 1 + len(self.numbered.streams)
        self._awaited = {name: first + at for at, name in enumerate(sorted(awaited))}
        first += len(awaited)
        self._groups = {name: first + at for at, name in enumerate(sorted(groups))}
        self._count = first + len(groups)
        self._sets: dict[int, list[Holders]] = {}
        self._forks: dict[int, _Fork] = {}

    def knows(self, path: BranchPath, number: int, earlier: int) -> bool:
        """Return True if `number`, on `path`, starts after `earlier` of every earlier step."""
        known = self._summaries[id(path)].known[number]
        return all(known & holders for holders in self._of(earlier))

    def is_followed(self, one: int, other: int) -> bool:
        """Return True if every step that runs `one` runs `other` too, which comes later."""
        within, around = self._lists.get(one, ()), self._lists.get(other, ())
        return within[: len(around)] == around

    @cached_property
    def _lists(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """The lists of branches around each operation, outermost first: branch, side."""
        found: dict[int, tuple[tuple[int, int], ...]] = {}
        for branch, sides in sorted(self.numbered.sides.items()):
            for side, numbers in enumerate(sides):
                for number in numbers:
                    found[number] = (*found.get(branch, ()), (branch, side))
        return found

    @cached_property
    def _summaries(self) -> dict[int, StepSummary]:
        return {id(path): self._summarize(path) for path in self.order.paths}

    def _of(self, earlier: int) -> list[Holders]:
        """Return the smallest sets of holders that may know the last instance of `earlier`."""
        if earlier in self._sets:
            return self._sets[earlier]
        found: list[Holders] = []
        ahead = [(1 << self._count) - 1]  # before the first step all know everything
        seen = set(ahead)
        while ahead:
            holders = ahead.pop()
            if any(holders & other == other for other in found):
                continue
            found = [other for other in found if other & holders != holders]
            found.append(holders)
            for path in self.order.paths:
                after = self._after(path, holders, earlier)
                if after not in seen:
                    seen.add(after)
                    ahead.append(after)
            if len(seen) > SETS_MAX:
                found, ahead = [0], []
        self._sets[earlier] = found
        return found

    def _after(self, path: BranchPath, holders: Holders, earlier: int) -> Holders:
        """Return the holders that know the last instance after a step on path `path`."""
        handed = self._summaries[id(path)]
        stream, position = self.numbered.stream[earlier], self.numbered.position[earlier]
        if path.known[earlier] is None:
            return handed.handed_on(holders)
        return handed.knowing(stream, position) | 2 << stream

    def _beginning(self) -> "_Fork":
        """Return the knowledge at the start of a step; all streams have that of the host."""
        tails = [1 | 2 << stream for stream in range(len(self.numbered.streams))]
        latest = {group: 1 << holder for group, holder in self._groups.items()}
        return _Fork([], 1, tails, latest)

    def _summarize(self, path: BranchPath) -> StepSummary:
        """Follow one path, from the branch at which it leaves earlier paths."""
        numbered, count = self.numbered, len(self.numbered.operations)
        fork = self._forks[path.since] if path.since else self._beginning()
        known = fork.known[: path.since] + [0] * (count - path.since)
        host, tails, latest = fork.host, list(fork.tails), dict(fork.latest)
        edges, previous, groups = numbered.edges, numbered.previous, numbered.group
        for number in range(path.since, count):
            if path.known[number] is None:
                continue
            operation, stream = numbered.operations[number], numbered.stream[number]
            if type(operation) is Allocate or (
                type(operation) is Free
                and not edges[number]
                and number not in previous
                and operation.mode is not FreeMode.HOST
            ):
                continue
            if number in numbered.sides:
                self._forks[number] = _Fork(known, host, list(tails), dict(latest))
            waited = 0
            for edge in edges[number]:
                waited |= known[edge]
            if number in previous:
                for name in previous[number]:
                    waited |= 1 << self._awaited[name]
            if stream != HOST:
                group = groups[number]
                if group:
                    waited |= latest[group]
                    latest[group] = tails[stream] | waited
                tails[stream] |= waited
                known[number] = tails[stream]
            elif type(operation) is Free and operation.mode is FreeMode.DEFERRED:
                continue
            elif type(operation) is Free and operation.mode is FreeMode.WAITED:
                tails[numbered.home[operation.buffer]] |= waited
            else:
                known[number] = host = host | waited
                tails = [tail | host for tail in tails]
        sources = [host, *tails]
        clocks: list[Clock | None] = [path.left.host, *path.left.tails]
        for name, holder in self._awaited.items():
            at = numbered.index.get(name)
            clock = None if at is None else path.finished(at)
            sources.append(1 << holder if at is None or clock is None else known[at])
            clocks.append(clock)
        for group in self._groups:
            sources.append(latest[group])
            last = path.left.latest.get(group)
            clocks.append(None if last is None else path.finished(last))
        return StepSummary(known, sources, clocks)
