"""Where operations of a communicator meet: who waits for whom, and when they can start."""

from collections.abc import Callable
from dataclasses import dataclass, field

import simpy

from zsim.collective.ring import laps
from zsim.collective.volume import element_count
from zsim.operation import Broadcast, Communication, Receive, Send
from zsim_des.fold import RankClass
from zsim_des.links import Links, Loads, joined
from zsim_des.network import Network

Key = tuple[int | str, ...]
"""What is met: a communicator class and the number of its collective, or a pair and its number."""


class MismatchError(RuntimeError):
    """Ranks met with operations that do not belong together."""


@dataclass(slots=True)
class Entry:
    """One operation of a communicator (or several issued together) on one rank class.

    `keys` are those that it meets others at, one per member, taken when the host issues it.
    """

    rank_class: RankClass
    name: str
    step: int
    members: tuple[tuple[Communication, int], ...]
    keys: tuple[Key, ...]
    finish: Callable[[int], None]
    ready_ps: int = 0


@dataclass(slots=True)
class Meeting:
    """Who has come to a key; all there when `needed` have."""

    needed: int
    come: list[tuple[Entry, Communication]] = field(
        default_factory=list[tuple[Entry, Communication]]
    )


class Rendezvous:
    """Lets entries start when everyone they meet has come, and sends their bytes on the way."""

    def __init__(self, env: simpy.Environment, links: Links, network: Network) -> None:
        self.env = env
        self._links = links
        self._network = network
        self._meetings: dict[Key, Meeting] = {}
        self._counts: dict[Key, int] = {}
        self._rings: dict[int, tuple[Loads, int]] = {}

    def keys(
        self, rank_class: RankClass, members: tuple[tuple[Communication, int], ...]
    ) -> tuple[Key, ...]:
        """Where members of an operation that the host of `rank_class` issues now will meet."""
        return tuple([self._key(rank_class, member) for member, _ in members])

    def _key(self, rank_class: RankClass, member: Communication) -> Key:
        communicator = rank_class.communicators[member.group]
        own = rank_class.index
        if isinstance(member, Send | Receive):
            peer = rank_class.peers[member.group, member.offset].rank_class
            sends = isinstance(member, Send)
            offset = (member.offset if sends else -member.offset) % communicator.ranks
            pair = (own, peer, offset) if sends else (peer, own, offset)
            key: Key = (communicator.index, *pair)
            counter: Key = (communicator.index, *pair, "send" if sends else "receive")
        else:
            key, counter = (communicator.index,), (communicator.index, own)
        count = self._counts[counter] = self._counts.get(counter, 0) + 1
        return (*key, "number", count)

    def come(self, entry: Entry) -> None:
        """`entry` is ready; start it and those that it meets if nobody is missing.

        Raises:
            MismatchError: what others brought to the same place is another operation.
        """
        if len(entry.keys) == 1:
            member, _ = entry.members[0]
            communicator = entry.rank_class.communicators[member.group]
            if len(communicator.classes) == 1 and not isinstance(member, Send | Receive):
                self._start([entry])
                return
        for key, (member, _) in zip(entry.keys, entry.members, strict=True):
            meeting = self._meetings.get(key)
            if meeting is None:
                communicator = entry.rank_class.communicators[member.group]
                is_pair = isinstance(member, Send | Receive)
                meeting = Meeting(2 if is_pair else len(communicator.classes))
                self._meetings[key] = meeting
            if meeting.come:
                _must_match((entry, member), meeting.come[0])
            meeting.come.append((entry, member))
        met = self._met(entry)
        if met is not None:
            for one in met:
                for key in one.keys:
                    self._meetings.pop(key, None)
            self._start(met)

    def _met(self, entry: Entry) -> list[Entry] | None:
        """Every entry that starts with this one, in order of rank class; None if one is missing."""
        found = {id(entry): entry}
        waiting = [entry]
        while waiting:
            for key in waiting.pop().keys:
                meeting = self._meetings.get(key)
                if meeting is None or len(meeting.come) < meeting.needed:
                    return None
                for other, _ in meeting.come:
                    if id(other) not in found:
                        found[id(other)] = other
                        waiting.append(other)
        return sorted(found.values(), key=lambda one: one.rank_class.index)

    def missing(self, entry: Entry) -> str:
        """Who has not come to where `entry` waits, in words."""
        for key, (member, _) in zip(entry.keys, entry.members, strict=True):
            meeting = self._meetings.get(key)
            if meeting is None or len(meeting.come) >= meeting.needed:
                continue
            if isinstance(member, Send | Receive):
                other = "Receive" if isinstance(member, Send) else "Send"
                return f"the {other} of member {member.offset:+d} on group {member.group}"
            communicator = entry.rank_class.communicators[member.group]
            here = {other.rank_class.index for other, _ in meeting.come}
            absent = [index for index in communicator.classes if index not in here]
            return f"{len(absent)} of {len(communicator.classes)} members of group {member.group}"
        return "an operation issued together with one that it meets"

    def _start(self, met: list[Entry]) -> None:
        start_ps = max([entry.ready_ps for entry in met])
        parts: list[tuple[Loads, int]] = []
        rings: set[Key] = set()
        latency_ps = 0
        for entry in met:
            for key, (member, size_bytes) in zip(entry.keys, entry.members, strict=True):
                if isinstance(member, Receive) or key in rings:
                    continue
                rings.add(key)
                loads, part_ps = self._part(entry.rank_class, member)
                latency_ps = max(latency_ps, part_ps)
                if size_bytes:
                    parts.append((loads, size_bytes))
        begin_ps = start_ps + latency_ps

        def finish() -> None:
            end_ps = int(self.env.now)
            for entry in met:
                entry.finish(end_ps)

        if not parts:
            for entry in met:
                entry.finish(begin_ps)
            return
        shape, size_bytes = joined(parts)
        number, step = self._network.number(shape), met[0].step
        alarm = self.env.timeout(begin_ps - int(self.env.now))
        alarm.callbacks.append(lambda _: self._network.join(number, size_bytes, step, finish))

    def _part(self, rank_class: RankClass, member: Communication) -> tuple[Loads, int]:
        """Loads and latency of one member."""
        group = member.group
        if isinstance(member, Send | Receive):
            offset = member.offset
            latency_ps = self._links.send_latency_ps(rank_class, group, offset)
            return self._links.send(rank_class, group, offset), latency_ps
        communicator = rank_class.communicators[group]
        if communicator.index not in self._rings:
            lap_ps = self._links.lap_ps(communicator)
            self._rings[communicator.index] = (self._links.ring(communicator), lap_ps)
        loads, lap_ps = self._rings[communicator.index]
        return loads, lap_ps * laps(member)


def _must_match(one: tuple[Entry, Communication], other: tuple[Entry, Communication]) -> None:
    """Raise unless two members that meet are the same collective on views of the same size."""
    (entry, mine), (before, theirs) = one, other
    if isinstance(mine, Send | Receive):
        fits = element_count(mine) == element_count(theirs) and mine.wire is theirs.wire
    else:
        fits = type(mine) is type(theirs) and mine.wire is theirs.wire
        fits = fits and element_count(mine) == element_count(theirs)
        if isinstance(mine, Broadcast) and isinstance(theirs, Broadcast):
            fits = fits and mine.root == theirs.root
    if not fits:
        raise MismatchError(
            f"group {mine.group}: {entry.name} of role {entry.rank_class.program.role} meets "
            f"{before.name} of role {before.rank_class.program.role}, which does not match"
        )
