"""The rendezvous of a communicator's operations: which ranks wait, and when they can start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from zsim.network.volume import element_count
from zsim.schedule.operation import (
    AllToAll,
    Broadcast,
    CollectiveOperation,
    Communication,
    PointToPoint,
    Receive,
    ReducingOperation,
    Send,
)
from zsim_des.clock.ready_queue import Agenda
from zsim_des.engine.arrival import ALONE, Arrival, Key, MetRanks
from zsim_des.engine.instruction import Enqueue
from zsim_des.engine.watch import Durations
from zsim_des.network.carried import Carried
from zsim_des.network.fluid import Network
from zsim_des.symmetry.classes import RankClass
from zsim_des.symmetry.folded_links import FoldedLinkTable, States, joined, shapes


class MismatchError(RuntimeError):
    """Ranks met with operations that do not match."""


@dataclass(slots=True)
class CarriedStart:
    """Bytes on the host side of a node: when they can start, and a callback for the end."""

    ready_ps: int
    finish: Callable[[int], None]


class Rendezvous:
    """Starts entries when all that they meet have arrived, and sends their bytes."""

    def __init__(
        self,
        agenda: Agenda,
        links: FoldedLinkTable,
        network: Network,
        durations: Durations | None = None,
    ) -> None:
        self._agenda = agenda
        self._durations = durations
        self._links = links
        self.network = network
        self._meetings: dict[Key, MetRanks] = {}
        self._counts: dict[Key, int] = {}
        self._carried: dict[tuple[object, ...], int | None] = {}
        self._sends: dict[tuple[int, str, int], int] = {}
        self._rings: dict[tuple[object, ...], tuple[int, int]] = {}
        self._busiest: dict[tuple[object, ...], tuple[int, int | None]] = {}

    def keys(
        self, rank_class: RankClass, members: tuple[tuple[Communication, int], ...]
    ) -> tuple[Key, ...]:
        """Return the keys at which the members of an operation, issued now, will meet."""
        if len(members) == 1:
            member, _ = members[0]
            if not isinstance(member, PointToPoint):
                communicator = rank_class.communicators[member.group]
                if len(communicator.classes) == 1:
                    return ALONE
        return tuple([self._key(rank_class, member) for member, _ in members])

    def _key(self, rank_class: RankClass, member: Communication) -> Key:
        communicator = rank_class.communicators[member.group]
        own = rank_class.index
        if isinstance(member, PointToPoint):
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

    def come(self, entry: Arrival) -> None:
        """Mark `entry` as ready; start it and the entries it meets once all have arrived.

        Raises:
            MismatchError: others arrived at the same key with another operation.
        """
        if entry.keys is ALONE:
            self._start([entry])
            return
        if len(entry.keys) == 1:
            if isinstance(entry.members[0][0], PointToPoint):
                self._pair(entry)
            else:
                self._gather(entry, entry.keys[0])
            return
        if all(isinstance(member, PointToPoint) for member, _ in entry.members):
            self._pair(entry)
            return
        for key, (member, _) in zip(entry.keys, entry.members, strict=True):
            meeting = self._meetings.get(key)
            if meeting is None:
                communicator = entry.rank_class.communicators[member.group]
                is_pair = isinstance(member, PointToPoint)
                meeting = MetRanks(2 if is_pair else len(communicator.classes))
                self._meetings[key] = meeting
            if meeting.come:
                _must_match((entry, member), meeting.come[0])
            meeting.come.append((entry, member))
        meetings = [self._meetings[key] for key in entry.keys]
        if any(len(meeting.come) < meeting.needed for meeting in meetings):
            return
        met = self._met(entry)
        if met is not None:
            self._part(met)

    def _pair(self, entry: Arrival) -> None:
        """Do the same for messages: each starts once both of its ends have arrived.

        NCCL gives every peer of a group separate channels, which do not wait for each other; the
        group ends with the last one.
        """
        entry.left = len(entry.keys)
        met: list[tuple[Key, MetRanks]] = []
        for key, (member, _) in zip(entry.keys, entry.members, strict=True):
            meeting = self._meetings.setdefault(key, MetRanks(2))
            if meeting.come:
                _must_match((entry, member), meeting.come[0])
            meeting.come.append((entry, member))
            if len(meeting.come) == meeting.needed:
                met.append((key, self._meetings.pop(key)))
        for key, meeting in met:
            self._send(key, meeting.come)

    def _send(self, key: Key, come: list[tuple[Arrival, Communication]]) -> None:
        """Send a message between its two ends, both of which have arrived."""
        ends = [entry for entry, _ in come]
        ready_ps = max(entry.ready_ps for entry in ends)
        if self._durations is not None:
            first = min(ends, key=lambda entry: entry.rank_class.index)
            end_ps = ready_ps + self._durations.communication_ps(first.step, first.name)
            for entry in ends:
                entry.end(key, end_ps)
            return
        sender, message = next(each for each in come if isinstance(each[1], Send))
        assert isinstance(message, Send)
        peer = (sender.rank_class, message.group, message.offset)
        size_bytes = next(size for member, size in sender.members if member is message)
        latency_ps = self._links.send_latency_ps(*peer, self.network.state)
        if not size_bytes:
            for entry in ends:
                entry.end(key, ready_ps + latency_ps)
            return
        env, network, step = self._agenda.env, self.network, sender.step
        number = self._message_shape(sender.rank_class, message)

        def finish() -> None:
            end_ps = env.now
            for entry in ends:
                entry.end(key, end_ps)
            self._agenda.run()

        told = [] if sender.moves is None else ends
        if ends[0] is ends[1]:  # one class sends and receives: the bytes pass its memory twice
            told, passes = told[:1], 2
        else:
            passes = 1

        def moves(per_s: Fraction) -> None:
            for entry in told:
                entry.move(key, passes * per_s)

        def begin() -> None:
            network.join(number, size_bytes, step, finish, moves=moves if told else None)

        env.at(ready_ps + latency_ps, begin)

    def _message_shape(self, rank_class: RankClass, message: Send) -> int:
        """Return the shape number of a message from a rank class to a peer."""
        peer = (rank_class.index, message.group, message.offset)
        found = self._sends.get(peer)
        if found is None:
            loads = self._links.send(rank_class, message.group, message.offset)
            found = self._sends[peer] = self.network.number(shapes(loads))
        return found

    def _gather(self, entry: Arrival, key: Key) -> None:
        """Do the same for one collective that `entry` issues alone."""
        member, _ = entry.members[0]
        meeting = self._meetings.get(key)
        if meeting is None:
            needed = len(entry.rank_class.communicators[member.group].classes)
            meeting = self._meetings[key] = MetRanks(needed)
        come = meeting.come
        if come and come[0][1] is not member:
            _must_match((entry, member), come[0])
        come.append((entry, member))
        if len(come) < meeting.needed:
            return
        if any(len(one.keys) > 1 for one, _ in come):
            met = self._met(entry)
        else:
            met = sorted([one for one, _ in come], key=lambda one: one.rank_class.index)
        if met is not None:
            self._part(met)

    def _part(self, met: list[Arrival]) -> None:
        """Remove the keys of a complete meeting and start its entries."""
        for one in met:
            for key in one.keys:
                self._meetings.pop(key, None)
        self._start(met)

    def _met(self, entry: Arrival) -> list[Arrival] | None:
        """Return every entry that starts with this one, by rank class; None if one is missing."""
        found = {id(entry): entry}
        seen: set[Key] = set()
        waiting = [entry]
        while waiting:
            for key in waiting.pop().keys:
                if key in seen:
                    continue
                seen.add(key)
                meeting = self._meetings.get(key)
                if meeting is None or len(meeting.come) < meeting.needed:
                    return None
                for other, _ in meeting.come:
                    if id(other) not in found:
                        found[id(other)] = other
                        waiting.append(other)
        return sorted(found.values(), key=lambda one: one.rank_class.index)

    def missing(self, entry: Arrival) -> str:
        """Describe the members that have not arrived where `entry` waits."""
        for key, (member, _) in zip(entry.keys, entry.members, strict=True):
            meeting = self._meetings.get(key)
            if meeting is None or len(meeting.come) >= meeting.needed:
                continue
            if isinstance(member, PointToPoint):
                other = "Receive" if isinstance(member, Send) else "Send"
                return f"the {other} of member {member.offset:+d} on group {member.group}"
            communicator = entry.rank_class.communicators[member.group]
            here = {other.rank_class.index for other, _ in meeting.come}
            absent = [index for index in communicator.classes if index not in here]
            return f"{len(absent)} of {len(communicator.classes)} members of group {member.group}"
        return "an operation issued together with one that it meets"

    def _start(self, met: list[Arrival]) -> None:
        """Send the bytes of all entries as one activity, once the last of them is ready."""
        first = met[0]
        if self._durations is not None:
            time_ps = self._durations.communication_ps(first.step, first.name)
            end_ps = max([entry.ready_ps for entry in met]) + time_ps
            for entry in met:
                entry.finish(end_ps)
            return
        member, size_bytes = first.members[0]
        is_one = len(met) == 1 or all(len(entry.keys) == 1 for entry in met)
        if is_one and len(first.keys) == 1 and isinstance(member, CollectiveOperation):
            size_bytes, between_bytes = self._most_bytes(met, 0)
            number, latency_ps = self.ring(first.rank_class, member, size_bytes, between_bytes)
        else:
            number, size_bytes, latency_ps = self._together(met)
        begin_ps = max([entry.ready_ps for entry in met]) + latency_ps
        for entry in met:
            if entry.begins is not None:
                entry.begins(begin_ps)
        if not size_bytes:
            for entry in met:
                entry.finish(begin_ps)
            return

        env, step = self._agenda.env, first.step

        def finish() -> None:
            end_ps = env.now
            for entry in met:
                entry.finish(end_ps)
            self._agenda.run()

        network = self.network

        moves = None if first.moves is None else _moves(met, size_bytes)

        def begin() -> None:
            network.join(number, size_bytes, step, finish, moves=moves)

        env.at(begin_ps, begin)

    def carry(self, rank_class: RankClass, what: Enqueue, step: int, start: CarriedStart) -> bool:
        """Move bytes on the host side from `start.ready_ps` on, if its links are described.

        Call `start.finish` with the end. Return False if no links are known or no bytes move.
        """
        assert what.carries is not None
        size_bytes = what.carries.size_bytes
        number = self._carried_shape(rank_class, what.carries)
        if number is None or not size_bytes or self._durations is not None:
            return False
        env, join = self._agenda.env, self.network.join

        def finish() -> None:
            start.finish(env.now)
            self._agenda.run()

        begin_ps = start.ready_ps + self._links.latency_ps(what.carries.flow)
        env.at(begin_ps, lambda: join(number, size_bytes, step, finish))
        return True

    def _carried_shape(self, rank_class: RankClass, what: Carried) -> int | None:
        """Return the shape number of host-side traffic of a class; None if no links carry it."""
        key = (rank_class.index, what.flow, what.kernel, what.access, what.share)
        if key not in self._carried:
            loads = self._links.carried(rank_class, what)
            number = None if loads is None else self.network.number(shapes(loads))
            self._carried[key] = number
        return self._carried[key]

    def ring(
        self,
        rank_class: RankClass,
        member: CollectiveOperation,
        size_bytes: int,
        between_bytes: int | None = None,
    ) -> tuple[int, int]:
        """Return the shape number and the latency of a collective that starts now.

        With unequal blocks, the busiest domain exchanges `between_bytes` with the others.
        """
        communicator = rank_class.communicators[member.group]
        state = self.network.state
        key = (communicator.index, member.agreed, type(member), size_bytes, between_bytes, state)
        found = self._rings.get(key)
        if found is None:
            demand = self._links.demand(
                communicator, member, size_bytes, state=state, between_bytes=between_bytes
            )
            loads = self._links.ring(communicator, demand)
            if demand is None:
                latency_ps = self._links.lap_ps(communicator, state) * member.laps
            else:
                latency_ps = demand.latency_ps
            found = self._rings[key] = (self.network.number(shapes(loads)), latency_ps)
        return found

    def _together(self, met: list[Arrival]) -> tuple[int, int, int]:
        """Return shape number, bytes of progress and latency of all members of `met` as one."""
        parts: list[tuple[States, int]] = []
        rings: set[Key] = set()
        longest_ps = 0
        for entry in met:
            each = zip(entry.keys, entry.members, strict=True)
            for index, (key, (member, own_bytes)) in enumerate(each):
                if isinstance(member, Receive) or key in rings:
                    continue
                rings.add(key)
                size_bytes = own_bytes
                if isinstance(member, Send):
                    peer = (entry.rank_class, member.group, member.offset)
                    loads = self._links.send(*peer)
                    latency_ps = self._links.send_latency_ps(*peer, self.network.state)
                else:
                    assert isinstance(member, CollectiveOperation)
                    size_bytes, between_bytes = self._most_bytes(met, index)
                    number, latency_ps = self.ring(
                        entry.rank_class, member, size_bytes, between_bytes
                    )
                    loads = tuple(dict(shape) for shape in self.network.shapes(number))
                longest_ps = max(longest_ps, latency_ps)
                if size_bytes:
                    parts.append((loads, size_bytes))
        if not parts:
            return 0, 0, longest_ps
        taken, size_bytes = joined(parts)
        return self.network.number(taken), size_bytes, longest_ps

    def _most_bytes(self, met: Sequence[Arrival], index: int) -> tuple[int, int | None]:
        """Return the bytes of collective number `index` of entries that meet.

        With unequal blocks, these are the bytes of the busiest member, and the bytes that the
        busiest domain exchanges with the others.
        """
        first = met[0]
        member, size_bytes = first.members[index]
        if not isinstance(member, AllToAll) or not member.sent:
            return size_bytes, None
        exchanges = [
            (entry.rank_class.index, each)
            for entry in met
            for each in (entry.members[index][0],)
            if isinstance(each, AllToAll)
        ]
        blocks = tuple([(where, each.sent, each.received, each.kept) for where, each in exchanges])
        communicator = first.rank_class.communicators[member.group]
        key = (communicator.index, member.wire, blocks)
        found = self._busiest.get(key)
        if found is None:
            from zsim_des.engine.unequal_blocks import busiest  # noqa: PLC0415 (few schedules have unequal blocks)

            found = self._busiest[key] = busiest(communicator, exchanges)
        return found


def _moves(met: Sequence[Arrival], size_bytes: int) -> Callable[[Fraction], None]:
    """Return a function that tells each entry the rate at which it passes the GPU's memory."""
    passes = [_passes(entry.members) / size_bytes for entry in met]

    def moves(per_s: Fraction) -> None:
        for entry, share in zip(met, passes, strict=True):
            assert entry.moves is not None
            entry.moves(per_s * share)

    return moves


def _passes(members: tuple[tuple[Communication, int], ...]) -> Fraction:
    """Return the bytes that `members` read from and write to the memory of a GPU.

    For each byte it sends, a rank reads one, its own or one that it received; it writes each byte
    that it receives. To reduce, it also reads its own. An all-reduce reduces on one of its two
    laps. Source: the primitives of NCCL, such as recvReduceSend and recvCopySend (Hu et al. 2025,
    "Demystifying NCCL").
    """
    passed = Fraction(0)
    for member, size_bytes in members:
        if isinstance(member, CollectiveOperation):
            adds = isinstance(member, ReducingOperation) and not member.in_parts
            reads_own = Fraction(adds, member.laps)
            passed += (2 + reads_own) * size_bytes
        elif isinstance(member, Receive):
            passed += member.target.size * member.wire.size_bytes
        else:
            passed += size_bytes
    return passed


def _must_match(one: tuple[Arrival, Communication], other: tuple[Arrival, Communication]) -> None:
    """Raise MismatchError unless two members that meet are the same operation on equal sizes."""
    (entry, mine), (before, theirs) = one, other
    uneven = isinstance(mine, AllToAll) and bool(mine.sent)
    fits = mine.wire is theirs.wire
    fits = fits and (uneven or element_count(mine) == element_count(theirs))
    if not isinstance(mine, PointToPoint):
        fits = fits and type(mine) is type(theirs)
    if isinstance(mine, Broadcast) and isinstance(theirs, Broadcast):
        fits = fits and mine.root == theirs.root
    if not fits:
        raise MismatchError(
            f"group {mine.group}: {entry.name} of role {entry.rank_class.program.role} meets "
            f"{before.name} of role {before.rank_class.program.role}, which does not match"
        )
