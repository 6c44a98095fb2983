"""Happens-before on one rank: what must have finished when an operation starts.

Streams are first-in-first-out, so what is known about a stream is one number: the position up to
which everything that ran on it has finished. A clock has one such number for each stream; it is
exact for the orders of one program: host order, streams, `after`, waits of the host, waits of
frees, and communicators, whose operations run one at a time. Orders that arise only through what
another role does are not counted: what is proved here holds whatever the other roles do.

A step stands for any number of them. Its own entries on a stream are numbered from 1; positions
from 0 down are earlier steps. What those guarantee comes in as an `Entry`: `unknown` claims no more
than the order of each stream; `settled` finds the largest claim that holds for the first step,
since setup ends with all streams drained, and that a step for which it holds leaves to the next.

A branch goes either way in any step. Only one that reads what another one read in the same step,
with nothing written to that buffer in between, goes as that one did.

Cost: one clock for each operation that waits for another; what follows a branch is gone through
once for each list that it may take.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

from zsim.schedule.operation import Allocate, Branch, Free, FreeMode, SetScalar, View
from zsim.schedule.program_index import HOST, READ, Numbered

Clock = tuple[int, ...]
"""For each stream, the position up to which everything that ran on it has finished.

Of the operation's own stream it may say less: there, what is before it has finished.
"""

NEVER = -(1 << 60)
"""A position before every operation of every step."""

OUTCOMES_MAX = 64
"""Ways through the branches of one part that are gone through; a check reports more."""


def later(one: Clock, other: Clock) -> Clock:
    """Return the element-wise maximum of two vector clocks (join)."""
    return tuple(map(max, one, other))


def sooner(one: Clock, other: Clock) -> Clock:
    """Return the element-wise minimum of two vector clocks (meet)."""
    return tuple(map(min, one, other))


@dataclass(slots=True)
class Entry:
    """Knowledge when a part begins: of the host, and on each stream.

    And what is known by who waits for the previous instance of an operation, or for the last one on
    a communicator.
    """

    host: Clock
    streams: list[Clock]
    previous: dict[str, Clock] = field(default_factory=dict[str, Clock])
    groups: dict[str, Clock] = field(default_factory=dict[str, Clock])


@dataclass(slots=True)
class State:
    """Knowledge while a program is gone through, of the host and on each stream.

    And the last operation of each group, and of each value or scalar that branches read the last of
    these and the list that it took.
    """

    host: Clock
    tails: list[Clock]
    latest: dict[str, int] = field(default_factory=dict[str, int])
    taken: dict[View | str, tuple[int, int]] = field(default_factory=dict)

    def copy(self) -> "State":
        """Return the same, to go another way from here."""
        return State(self.host, list(self.tails), dict(self.latest), dict(self.taken))


@dataclass(slots=True)
class Way:
    """One way through the branches of a part.

    `known` has, by number, of an operation on a stream what has finished when it starts; of a free
    what its home stream knows once it has waited, and of a deferred free what is known when the
    memory returns; of other actions of the host what the host knows after them; nothing of what
    does not run. Up to operation `since` the ways before this one have the same. `left` is what is
    known when the part ends.
    """

    numbered: Numbered
    known: list[Clock | None]
    since: int
    left: State

    def tail(self, stream: int, number: int) -> int:
        """Position of the last entry of `stream` that was issued before operation `number`."""
        entries = self.numbered.entries[stream]
        position = bisect_left(entries, number)
        while position and self.known[entries[position - 1]] is None:
            position -= 1
        return position

    def finished(self, number: int) -> Clock | None:
        """Return the clock of who knows that operation `number` of a stream has finished."""
        known = self.known[number]
        if known is None:
            return None
        stream = self.numbered.stream[number]
        return (*known[:stream], self.numbered.position[number], *known[stream + 1 :])

    def is_before(self, one: int, other: int) -> bool:
        """Return whether `one`, on a stream and issued first, has finished when `other` starts."""
        numbered, known = self.numbered, self.known[other]
        assert known is not None
        stream = numbered.stream[one]
        return stream == numbered.stream[other] or known[stream] >= numbered.position[one]


def drained(numbered: Numbered) -> Entry:
    """Return the entry of setup: there is nothing before it."""
    nothing = (0,) * len(numbered.streams)
    return Entry(nothing, [nothing] * len(numbered.streams))


def unknown(numbered: Numbered) -> Entry:
    """Return the entry of a step of whose past only the order of each stream is known."""
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
    """Ways through the branches of `items`."""
    ways = 1
    if numbered.sides:
        for number in items:
            if number in numbered.sides:
                then, otherwise = numbered.sides[number]
                ways *= outcomes(numbered, then) + outcomes(numbered, otherwise)
    return ways


def weaker(one: Entry, other: Entry) -> Entry:
    """Return what both claim."""
    return Entry(
        sooner(one.host, other.host),
        list(map(sooner, one.streams, other.streams)),
        _known_to_both(one.previous, other.previous),
        _known_to_both(one.groups, other.groups),
    )


def _known_to_both(one: dict[str, Clock], other: dict[str, Clock]) -> dict[str, Clock]:
    return {name: sooner(clock, other[name]) for name, clock in one.items() if name in other}


class Timeline:
    """Clocks of every operation of a part, for every way through its branches."""

    def __init__(self, numbered: Numbered, entry: Entry) -> None:
        self.numbered = numbered
        self.entry = entry
        self.ways: list[Way] = []
        state = State(entry.host, list(entry.streams))
        first = Way(numbered, [None] * len(numbered.operations), 0, state)
        self._run(numbered.items, state, first)

    @property
    def seam(self) -> Entry:
        """Return what a step leaves to the next one, whichever ways it took: that step's entry."""
        return reduce(weaker, map(self._left_by, self.ways))

    def _run(self, items: list[int], state: State, way: Way) -> None:
        numbered, known_at = self.numbered, way.known
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
                known_at[number] = self._act(number, state, way)
                if number in numbered.sides:
                    self._fork(number, items[place + 1 :], state, way)
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
                    known = self._after((last,), known, way)
                latest[group] = number
            known_at[number] = tails[stream] = known
        way.left = state
        self.ways.append(way)

    def _fork(self, branch: int, rest: list[int], state: State, way: Way) -> None:
        """Both ways on, or the only one: a list of the branch, then the rest."""
        sides = self.numbered.sides[branch]
        operation = self.numbered.operations[branch]
        assert isinstance(operation, Branch)
        read = operation.number
        before = state.taken.get(read)
        if before is not None and not self._is_written(read, before[0], branch, way):
            self._run(sides[before[1]] + rest, state, way)
            return
        other, copied = Way(self.numbered, list(way.known), branch, state), state.copy()
        for side, (after, each) in enumerate(((copied, way), (state, other))):
            after.taken[read] = (branch, side)
            self._run(sides[side] + rest, after, each)

    def _is_written(self, value: View | str, since: int, branch: int, way: Way) -> bool:
        """Return whether a buffer or scalar is written between two branches that read it."""
        if isinstance(value, str):
            between = self.numbered.operations[since:branch]
            return any(isinstance(each, SetScalar) and each.scalar == value for each in between)
        history = self.numbered.history[value.buffer]
        happens = zip(history.numbers, history.codes, strict=True)
        return any(
            code != READ and since < number < branch and way.known[number] is not None
            for number, code in happens
        )

    def _act(self, number: int, state: State, way: Way) -> Clock:
        """Carry out an action of the host; return what is known after it, as `Way` says."""
        numbered = self.numbered
        operation = numbered.operations[number]
        edges = numbered.edges[number]
        if isinstance(operation, Free):
            home = numbered.home[operation.buffer]
            if operation.mode is FreeMode.HOST:
                self._host_knows(state, self._after(edges, state.host, way))
                return state.tails[home]
            known = self._after(edges, state.tails[home], way)
            if operation.mode is FreeMode.WAITED:
                state.tails[home] = known
            return known
        if edges or number in numbered.previous:
            known = self._after(edges, state.host, way)
            self._host_knows(state, self._after_previous(number, known))
        return state.host

    def _host_knows(self, state: State, known: Clock) -> None:
        """Make what the host knows hold for everything that it issues from now on."""
        state.host = known
        state.tails[:] = [later(tail, known) for tail in state.tails]

    def _after(self, edges: Iterable[int], known: Clock, way: Way) -> Clock:
        """Return the clock once `edges` have finished too."""
        streams, positions = self.numbered.stream, self.numbered.position
        for edge in edges:
            clock = way.known[edge]
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

    def _left_by(self, way: Way) -> Entry:
        """Return what a step that goes one way leaves to the next one."""
        state = way.left
        numbered, length = self.numbered, self.numbered.length
        lifted = self._lifted(way) if numbered.sides else None

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
                clock = None if number is None else way.finished(number)
                if clock is not None:
                    previous[name] = clock
        groups = dict(self.entry.groups)
        for group, number in state.latest.items():
            clock = way.finished(number)
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
            # Whoever waits in the next step knows what the host does, too.
            {name: later(shifted(clock), host) for name, clock in previous.items()},
            {group: shifted(clock) for group, clock in groups.items()},
        )

    def _lifted(self, way: Way) -> list[list[int]]:
        """Of each stream, from each position on, the last position up to which nothing else runs.

        What did not run is as good as finished.
        """
        found: list[list[int]] = []
        for entries in self.numbered.entries:
            up = [len(entries)]
            for position in range(len(entries) - 1, -1, -1):
                up.append(position if way.known[entries[position]] is not None else up[-1])
            found.append(up[::-1])
        return found


ROUNDS_MAX = 12
"""Rounds in which the largest claim is looked for, before the past is taken as unknown."""


def settled(numbered: Numbered) -> Timeline:
    """Return the timeline of a step with all that is known of the steps before it, however many.

    The claim starts with what the first step knows and shrinks to what every step leaves. What
    still shrinks in the third round would do so for ever, and is given up.
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
        smaller = weaker(entry, timeline.seam)
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
