"""Happens-before on one rank: what must have finished when an operation starts.

Streams are first-in-first-out, so what is known about a stream is one number: the position up to
which everything that ran on it has finished. A clock has one such number for each stream; it is
exact for the orders of one program: host order, streams, `after`, waits of the host, waits of
frees, and communicators, whose operations run one at a time. Orders that arise only through what
another role does are not counted: what is proved here holds whatever the other roles do.

A step is looked at with an unknown past. Its own entries on a stream are numbered from 1; positions
from 0 down are earlier steps. What an earlier step guarantees comes in as an `Entry`: `unknown`
claims nothing, `Timeline.seam` what the step itself leaves behind. Either holds for every step but
the first, and the first knows more, since setup ends with all streams drained: so two steps, one
after the other, stand for any number of them.

Cost: one clock for each operation; what follows a branch is gone through once for each list.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zsim.numbered import HOST, Numbered
from zsim.operation import Free, FreeMode

Clock = tuple[int, ...]
"""For each stream, the position up to which everything that ran on it has finished."""

NEVER = -(1 << 60)
"""A position before every operation of every step."""

OUTCOMES_MAX = 64
"""Ways through the branches of one part that are gone through; a check reports more."""


def later(one: Clock, other: Clock) -> Clock:
    """What is known by who knows both."""
    return tuple(map(max, one, other))


def sooner(one: Clock, other: Clock) -> Clock:
    """What both know."""
    return tuple(map(min, one, other))


@dataclass(slots=True)
class Entry:
    """What is known when a part begins: by the host, on each stream, by previous instances."""

    host: Clock
    streams: list[Clock]
    previous: dict[str, Clock] = field(default_factory=dict[str, Clock])


@dataclass(slots=True)
class Stretch:
    """Operations from the start, or from a list of a branch on, to the next branch or the end.

    `known` goes along with `items`: of an operation on a stream, what has finished when it starts;
    of a free, what its home stream knows once it has waited, and of a deferred free what is known
    when the memory returns; of other actions of the host, what the host knows after them. `ways`
    has both ways on, after the branch that ends the stretch.
    """

    items: list[int]
    known: list[Clock]
    ways: tuple["Stretch", ...] = ()


def drained(numbered: Numbered) -> Entry:
    """The entry of setup: there is nothing before it."""
    nothing = (0,) * len(numbered.streams)
    return Entry(nothing, [nothing] * len(numbered.streams))


def unknown(numbered: Numbered) -> Entry:
    """The entry of a step of whose past only the order of each stream is known."""
    count = len(numbered.streams)

    def alone(stream: int, position: int) -> Clock:
        return tuple(position if other == stream else NEVER for other in range(count))

    always = set(numbered.items)
    previous: dict[str, Clock] = {}
    for names in numbered.previous.values():
        for name in names:
            number = numbered.index.get(name)
            if number in always:
                stream = numbered.stream[number]
                position = numbered.position[number] - numbered.length[stream]
                previous[name] = alone(stream, position)
    return Entry((NEVER,) * count, [alone(stream, 0) for stream in range(count)], previous)


def outcomes(numbered: Numbered, items: Sequence[int]) -> int:
    """Ways through the branches of `items`."""
    ways = 1
    if numbered.sides:
        for number in items:
            if number in numbered.sides:
                then, otherwise = numbered.sides[number]
                ways *= outcomes(numbered, then) + outcomes(numbered, otherwise)
    return ways


@dataclass(slots=True)
class _State:
    """What is known while a program is gone through, and the last operation of each group."""

    host: Clock
    tails: list[Clock]
    latest: dict[str, int]

    def copy(self) -> "_State":
        return _State(self.host, list(self.tails), dict(self.latest))


class Timeline:
    """Clocks of every operation of a part, for every way through its branches."""

    def __init__(self, numbered: Numbered, entry: Entry) -> None:
        self.numbered = numbered
        self.entry = entry
        self._finished: list[Clock | None] = [None] * len(numbered.operations)
        self._leaving: list[Entry] = []
        self.start = self._run(numbered.items, _State(entry.host, list(entry.streams), {}))

    @property
    def seam(self) -> Entry:
        """What a step leaves to the next one, whichever ways it took: the entry of that step."""
        first, *others = self._leaving
        host, streams, previous = first.host, first.streams, first.previous
        for other in others:
            host = sooner(host, other.host)
            streams = list(map(sooner, streams, other.streams))
            previous = {
                name: sooner(clock, other.previous[name])
                for name, clock in previous.items()
                if name in other.previous
            }
        return Entry(host, streams, previous)

    def _leave(self, state: _State) -> None:
        numbered, length = self.numbered, self.numbered.length

        def shifted(clock: Clock) -> Clock:
            return tuple(map(int.__sub__, clock, length))

        previous: dict[str, Clock] = {}
        for names in numbered.previous.values():
            for name in names:
                number = numbered.index.get(name)
                clock = None if number is None else self._finished[number]
                if clock is not None:
                    previous[name] = shifted(clock)
        self._leaving.append(Entry(shifted(state.host), list(map(shifted, state.tails)), previous))

    def _run(self, items: list[int], state: _State) -> Stretch:
        numbered, finished = self.numbered, self._finished
        streams, positions, groups = numbered.stream, numbered.position, numbered.group
        edges, previous = numbered.edges, numbered.previous
        tails, latest = state.tails, state.latest
        known_at: list[Clock] = []
        for place, number in enumerate(items):
            stream = streams[number]
            if stream == HOST:
                known_at.append(self._act(number, state))
                if number in numbered.sides:
                    rest = items[place + 1 :]
                    return Stretch(items[: place + 1], known_at, self._fork(number, rest, state))
                continue
            known = tails[stream]
            for edge in edges[number]:
                clock = finished[edge]
                if clock is not None and known[streams[edge]] < positions[edge]:
                    known = later(known, clock)
            if number in previous:
                known = self._after_previous(number, known)
            if groups[number]:
                last = latest.get(groups[number])
                if last is not None and known[streams[last]] < positions[last]:
                    clock = finished[last]
                    assert clock is not None
                    known = later(known, clock)
                latest[groups[number]] = number
            known_at.append(known)
            tails[stream] = finished[number] = (
                *known[:stream],
                positions[number],
                *known[stream + 1 :],
            )
        self._leave(state)
        return Stretch(items, known_at)

    def _fork(self, branch: int, rest: list[int], state: _State) -> tuple[Stretch, Stretch]:
        """Both ways on: a list of the branch, then the rest. Of the other list nothing has run."""
        then, otherwise = self.numbered.sides[branch]
        one = self._run(then + rest, state.copy())
        behind = len(self._finished) - branch - 1
        self._finished[branch + 1 :] = [None] * behind
        return one, self._run(otherwise + rest, state)

    def _act(self, number: int, state: _State) -> Clock:
        """An action of the host; what is known after it, as `Stretch` says."""
        numbered = self.numbered
        operation = numbered.operations[number]
        if isinstance(operation, Free):
            home = numbered.home[operation.buffer]
            tail = state.tails[home]
            if not numbered.edges[number]:
                return tail
            known = self._after(number, tail)
            if operation.mode is FreeMode.HOST:
                self._host_knows(state, self._after(number, state.host))
                known = state.tails[home]
            elif operation.mode is FreeMode.WAITED and known is not tail:
                known = (*known[:home], numbered.position[number], *known[home + 1 :])
                state.tails[home] = known
            return known
        if numbered.edges[number] or number in numbered.previous:
            known = self._after_previous(number, self._after(number, state.host))
            self._host_knows(state, known)
        return state.host

    def _host_knows(self, state: _State, known: Clock) -> None:
        """What the host knows holds for everything that it issues from now on."""
        state.host = known
        state.tails[:] = [later(tail, known) for tail in state.tails]

    def _after(self, number: int, known: Clock) -> Clock:
        numbered = self.numbered
        for edge in numbered.edges[number]:
            clock = self._finished[edge]
            if clock is not None and known[numbered.stream[edge]] < numbered.position[edge]:
                known = later(known, clock)
        return known

    def _after_previous(self, number: int, known: Clock) -> Clock:
        for name in self.numbered.previous.get(number, ()):
            clock = self.entry.previous.get(name)
            if clock is not None:
                known = later(known, clock)
        return known
