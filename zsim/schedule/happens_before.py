"""Happens-before on one rank: the operations that have finished when another one starts.

Streams are first-in-first-out, so one number describes progress on a stream: the position up to
which all its operations have finished. A clock holds one such number per stream. It is exact for
the orders within one program: host order, streams, `after`, waits of the host, waits of frees, and
communicators, whose operations run one at a time. Orders that exist only because of another role's
program are ignored, so a proof holds whatever the other roles do.

One step represents any number of steps. Its own operations on a stream are numbered from 1;
positions from 0 down are earlier steps. An `Entry` holds the guarantees of those earlier steps:
`unknown` assumes only the order of each stream; `settled` finds the largest claim that holds for
the first step (setup ends with all streams drained) and that each step passes on to the next.

A branch may take either list in any step. Only a branch on a value that an earlier branch of the
step has read, with no write to that buffer in between, takes the same list as that one.

Cost: one clock per operation that waits for another. Operations after a branch are traversed once
for each list that the branch may take.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

from zsim.schedule.operation import Allocate, Branch, Free, FreeMode, SetScalar, View
from zsim.schedule.program_index import HOST, READ, Numbered

Clock = tuple[int, ...]
"""For each stream, the position up to which all its operations have finished.

For the operation's own stream it may be lower: everything before it there has finished anyway.
"""

NEVER = -(1 << 60)
"""A position before every operation of every step."""

OUTCOMES_MAX = 64
"""Maximum number of paths through the branches of one part; a check reports programs with more."""


def later(one: Clock, other: Clock) -> Clock:
    """Return the element-wise maximum of two vector clocks (join)."""
    return tuple(map(max, one, other))


def sooner(one: Clock, other: Clock) -> Clock:
    """Return the element-wise minimum of two vector clocks (meet)."""
    return tuple(map(min, one, other))


@dataclass(slots=True)
class Entry:
    """Clocks when a part starts: of the host, and of each stream.

    `previous` holds the clock of a wait for the previous step's instance of an operation, by name.
    `groups` holds the clock after the last operation on each communicator.
    """

    host: Clock
    streams: list[Clock]
    previous: dict[str, Clock] = field(default_factory=dict[str, Clock])
    groups: dict[str, Clock] = field(default_factory=dict[str, Clock])


@dataclass(slots=True)
class State:
    """Clocks while a program is traversed: of the host, and of each stream.

    `latest` holds the last operation of each group. `taken` holds, for each value or scalar, the
    last branch that read it and the list that it took.
    """

    host: Clock
    tails: list[Clock]
    latest: dict[str, int] = field(default_factory=dict[str, int])
    taken: dict[View | str, tuple[int, int]] = field(default_factory=dict)

    def copy(self) -> "State":
        """Return a copy, to follow another path from here."""
        return State(self.host, list(self.tails), dict(self.latest), dict(self.taken))


@dataclass(slots=True)
class BranchPath:
    """One path through the branches of a part.

    `known` holds a clock by operation number. For an operation on a stream it is the clock at its
    start; for a free, the clock of its home stream after its waits; for a deferred free, the clock
    when the memory returns; for other host actions, the host's clock after them. It is None for
    operations that do not run on this path. Up to operation `since` earlier paths have the same
    clocks. `left` is the state when the part ends.
    """

    numbered: Numbered
    known: list[Clock | None]
    since: int
    left: State

    def tail(self, stream: int, number: int) -> int:
        """Return the position of the last entry of `stream` issued before operation `number`."""
        entries = self.numbered.entries[stream]
        position = bisect_left(entries, number)
        while position and self.known[entries[position - 1]] is None:
            position -= 1
        return position

    def finished(self, number: int) -> Clock | None:
        """Return the clock after operation `number` of a stream ends; None if it does not run."""
        known = self.known[number]
        if known is None:
            return None
        stream = self.numbered.stream[number]
        return (*known[:stream], self.numbered.position[number], *known[stream + 1 :])

    def is_before(self, one: int, other: int) -> bool:
        """Return True if `one`, on a stream and issued first, has finished when `other` starts."""
        numbered, known = self.numbered, self.known[other]
        assert known is not None
        stream = numbered.stream[one]
        return stream == numbered.stream[other] or known[stream] >= numbered.position[one]


def drained(numbered: Numbered) -> Entry:
    """Return the entry of setup, before which no operation runs."""
    nothing = (0,) * len(numbered.streams)
    return Entry(nothing, [nothing] * len(numbered.streams))


def unknown(numbered: Numbered) -> Entry:
    """Return the entry of a step before which only the order of each stream is known."""
    count, length = len(numbered.streams), numbered.length

    def alone(stream: int, position: int) -> Clock:
        return tuple(position if other == stream else NEVER for other in range(count))

    always = set(numbered.items)
    previous: dict[str, Clock] = {}
    for names in numbered.previous.values():
        for name in names:
            number = numbered.index.get(name)
            if number in always:
                stream = numbered.stream[number]
                previous[name] = alone(stream, numbered.position[number] - length[stream])
    groups: dict[str, Clock] = {}
    for number in numbered.communications:
        if number in always:
            stream = numbered.stream[number]
            position = numbered.position[number] - length[stream]
            groups[numbered.group[number]] = alone(stream, position)
    return Entry((NEVER,) * count, [alone(stream, 0) for stream in range(count)], previous, groups)


def outcomes(numbered: Numbered, items: Sequence[int]) -> int:
    """Return the number of paths through the branches of `items`."""
    paths = 1
    if numbered.sides:
        for number in items:
            if number in numbered.sides:
                then, otherwise = numbered.sides[number]
                paths *= outcomes(numbered, then) + outcomes(numbered, otherwise)
    return paths


def weaker(one: Entry, other: Entry) -> Entry:
    """Return the claims that both entries make."""
    return Entry(
        sooner(one.host, other.host),
        list(map(sooner, one.streams, other.streams)),
        _known_to_both(one.previous, other.previous),
        _known_to_both(one.groups, other.groups),
    )


def _known_to_both(one: dict[str, Clock], other: dict[str, Clock]) -> dict[str, Clock]:
    return {name: sooner(clock, other[name]) for name, clock in one.items() if name in other}


class Timeline:
    """Clocks of every operation of a part, for every path through its branches."""

    def __init__(self, numbered: Numbered, entry: Entry) -> None:
        self.numbered = numbered
        self.entry = entry
        self.paths: list[BranchPath] = []
        state = State(entry.host, list(entry.streams))
        first = BranchPath(numbered, [None] * len(numbered.operations), 0, state)
        self._run(numbered.items, state, first)

    @property
    def next_entry(self) -> Entry:
        """The entry of the next step, valid for every path through this one."""
        return reduce(weaker, map(self._left_by, self.paths))

    def _run(self, items: list[int], state: State, path: BranchPath) -> None:
        numbered, known_at = self.numbered, path.known
        operations, streams, positions = numbered.operations, numbered.stream, numbered.position
        groups, edges, previous = numbered.group, numbered.edges, numbered.previous
        tails, latest, homes = state.tails, state.latest, numbered.home
        for place, number in enumerate(items):
            stream = streams[number]
            if stream == HOST:
                operation = operations[number]
                if type(operation) is Allocate:
                    known_at[number] = state.host
                    continue
                if type(operation) is Free and not edges[number]:
                    known_at[number] = tails[homes[operation.buffer]]
                    continue
                known_at[number] = self._act(number, state, path)
                if number in numbered.sides:
                    self._fork(number, items[place + 1 :], state, path)
                    return
                continue
            known = tails[stream]
            for edge in edges[number]:
                other = streams[edge]
                position = positions[edge]
                clock = known_at[edge]
                if known[other] < position and other != stream and clock is not None:
                    merged = list(map(max, known, clock))
                    merged[other] = position
                    known = tuple(merged)
            if number in previous:
                known = self._after_previous(number, known)
            group = groups[number]
            if group:
                last = latest.get(group)
                if last is None:
                    clock = self.entry.groups.get(group)
                    if clock is not None:
                        known = later(known, clock)
                elif streams[last] != stream:
                    known = self._after((last,), known, path)
                latest[group] = number
            known_at[number] = tails[stream] = known
        path.left = state
        self.paths.append(path)

    def _fork(self, branch: int, rest: list[int], state: State, path: BranchPath) -> None:
        """Traverse both lists of a branch, or the only possible one, and then the rest."""
        sides = self.numbered.sides[branch]
        operation = self.numbered.operations[branch]
        assert isinstance(operation, Branch)
        read = operation.number
        before = state.taken.get(read)
        if before is not None and not self._is_written(read, before[0], branch, path):
            self._run(sides[before[1]] + rest, state, path)
            return
        other, copied = BranchPath(self.numbered, list(path.known), branch, state), state.copy()
        for side, (after, each) in enumerate(((copied, path), (state, other))):
            after.taken[read] = (branch, side)
            self._run(sides[side] + rest, after, each)

    def _is_written(self, value: View | str, since: int, branch: int, path: BranchPath) -> bool:
        """Return True if a buffer or scalar is written between two branches that read it."""
        if isinstance(value, str):
            between = self.numbered.operations[since:branch]
            return any(isinstance(each, SetScalar) and each.scalar == value for each in between)
        history = self.numbered.history[value.buffer]
        happens = zip(history.numbers, history.codes, strict=True)
        return any(
            code != READ and since < number < branch and path.known[number] is not None
            for number, code in happens
        )

    def _act(self, number: int, state: State, path: BranchPath) -> Clock:
        """Carry out an action of the host; return its clock as defined in `BranchPath`."""
        numbered = self.numbered
        operation = numbered.operations[number]
        edges = numbered.edges[number]
        if isinstance(operation, Free):
            home = numbered.home[operation.buffer]
            if operation.mode is FreeMode.HOST:
                self._host_knows(state, self._after(edges, state.host, path))
                return state.tails[home]
            known = self._after(edges, state.tails[home], path)
            if operation.mode is FreeMode.WAITED:
                state.tails[home] = known
            return known
        if edges or number in numbered.previous:
            known = self._after(edges, state.host, path)
            self._host_knows(state, self._after_previous(number, known))
        return state.host

    def _host_knows(self, state: State, known: Clock) -> None:
        """Set the host's clock, which holds for everything that the host issues from now on."""
        state.host = known
        state.tails[:] = [later(tail, known) for tail in state.tails]

    def _after(self, edges: Iterable[int], known: Clock, path: BranchPath) -> Clock:
        """Return the clock after `edges` have finished too."""
        streams, positions = self.numbered.stream, self.numbered.position
        for edge in edges:
            clock = path.known[edge]
            other, position = streams[edge], positions[edge]
            if clock is not None and known[other] < position:
                merged = list(map(max, known, clock))
                merged[other] = position
                known = tuple(merged)
        return known

    def _after_previous(self, number: int, known: Clock) -> Clock:
        for name in self.numbered.previous.get(number, ()):
            clock = self.entry.previous.get(name)
            if clock is not None:
                known = later(known, clock)
        return known

    def _left_by(self, path: BranchPath) -> Entry:
        """Return the entry that one path of this step leaves to the next step."""
        state = path.left
        numbered, length = self.numbered, self.numbered.length
        lifted = self._lifted(path) if numbered.sides else None

        def shifted(clock: Clock) -> Clock:
            if lifted is not None:
                clock = tuple(
                    up[position] if position >= 0 else position
                    for up, position in zip(lifted, clock, strict=True)
                )
            return tuple(max(NEVER, a - b) for a, b in zip(clock, length, strict=True))

        previous = dict(self.entry.previous)
        for names in numbered.previous.values():
            for name in names:
                number = numbered.index.get(name)
                clock = None if number is None else path.finished(number)
                if clock is not None:
                    previous[name] = clock
        groups = dict(self.entry.groups)
        for group, number in state.latest.items():
            clock = path.finished(number)
            assert clock is not None
            groups[group] = clock
        tails = [
            (*tail[:stream], length[stream], *tail[stream + 1 :])
            for stream, tail in enumerate(state.tails)
        ]
        host = shifted(state.host)
        return Entry(
            host,
            list(map(shifted, tails)),
            # A wait in the next step also has the clock of the host.
            {name: later(shifted(clock), host) for name, clock in previous.items()},
            {group: shifted(clock) for group, clock in groups.items()},
        )

    def _lifted(self, path: BranchPath) -> list[list[int]]:
        """Return, by stream and position, the last position up to which no further operation runs.

        An operation that does not run counts as finished.
        """
        found: list[list[int]] = []
        for entries in self.numbered.entries:
            up = [len(entries)]
            for position in range(len(entries) - 1, -1, -1):
                up.append(position if path.known[entries[position]] is not None else up[-1])
            found.append(up[::-1])
        return found


ROUNDS_MAX = 12
"""Maximum number of rounds in search of the largest claim; then the past counts as unknown."""


def settled(numbered: Numbered) -> Timeline:
    """Return the timeline of a step, given everything known of any number of earlier steps.

    The claim starts with the guarantees of the first step and shrinks to those that every step
    leaves. A position that still shrinks in the third round would shrink forever, so it is
    dropped.
    """
    nothing = (0,) * len(numbered.streams)
    entry = Entry(
        nothing,
        [nothing] * len(numbered.streams),
        {name: nothing for names in numbered.previous.values() for name in names},
        {numbered.group[number]: nothing for number in numbered.communications},
    )
    for attempt in range(ROUNDS_MAX):
        timeline = Timeline(numbered, entry)
        smaller = weaker(entry, timeline.next_entry)
        if smaller == entry:
            return timeline
        entry = smaller if attempt < 2 else _without_what_shrinks(entry, smaller)
    return Timeline(numbered, unknown(numbered))


def _without_what_shrinks(entry: Entry, smaller: Entry) -> Entry:
    def kept(one: Clock, other: Clock) -> Clock:
        return tuple(a if a == b else NEVER for a, b in zip(one, other, strict=True))

    return Entry(
        kept(entry.host, smaller.host),
        list(map(kept, entry.streams, smaller.streams)),
        {name: kept(entry.previous[name], clock) for name, clock in smaller.previous.items()},
        {name: kept(entry.groups[name], clock) for name, clock in smaller.groups.items()},
    )
