"""Times of a run whose collectives never share the network: one pass in order of issue, no events.

If at most one activity is in flight at any time, and neither kernels nor links change their speed,
then no time depends on the order of events. The pass follows the hosts of all rank classes
together and stops them only at collectives. Every dependency of an entry was issued before it, so
its end is known. The streams give the same results.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zsim.schedule.operation import AllToAll, CollectiveOperation
from zsim_des.engine.host_issue import HostIssue, IssueStretch, Item
from zsim_des.engine.instruction import AllocateRequest, Enqueue
from zsim_des.engine.rank import Rank
from zsim_des.engine.rendezvous import Rendezvous
from zsim_des.engine.stream import ProgramRun


class NotAheadError(Exception):
    """Some times depend on events; simulate with them."""


@dataclass(frozen=True, slots=True)
class TapedCollective:
    """A collective of a tape. Collectives of equal `kind` take the same time."""

    member: CollectiveOperation
    size_bytes: int
    stream: int
    kind: int


Entry = tuple[Item, int, int, int, int, tuple[int, ...], bool, bool, TapedCollective | None]
"""An item, its slot, stream, time and offset in the stretch, and what it waits for.

Last: whether it waits for earlier runs, whether it is work, and its collective.
"""

Tape = list[tuple[IssueStretch, list[Entry]]]
"""The entries of a course by stretch, in order of issue."""

Arrived = tuple[int, TapedCollective]
"""When a collective is ready on one rank class, and the collective."""

Going = Generator[Arrived, int, None]
"""A host: yields at each collective, and receives its end."""


class Tapes:
    """The tapes of the courses of a schedule, each made at first use, and kinds of collectives."""

    def __init__(self) -> None:
        self._made: dict[int, Tape] = {}
        self._kinds: dict[tuple[object, ...], int] = {}

    def of(self, course: HostIssue) -> Tape:
        """Return the tape of `course`.

        Raises:
            NotAheadError: the course has entries whose times can change while they run.
        """
        found = self._made.get(id(course))
        if found is None:
            found = [(stretch, self._entries(stretch)) for stretch in course.stretches]
            self._made[id(course)] = found
        return found

    def _entries(self, stretch: IssueStretch) -> list[Entry]:
        if isinstance(stretch.stop, AllocateRequest):
            raise NotAheadError
        found: list[Entry] = []
        for item in stretch.acts:
            if isinstance(item, Item):
                what, meeting = item.what, self._meeting(item.what) if item.is_met else None
                if item.is_carried or what.begins is not None:
                    raise NotAheadError
                place = (item, item.slot, what.stream, item.time_ps)
                waits_for = (stretch.offsets_ps[item.order], item.here, item.looks_back)
                found.append((*place, *waits_for, what.operation is not None, meeting))
        return found

    def _meeting(self, what: Enqueue) -> TapedCollective:
        (member, size_bytes), *others = what.members
        if others or not isinstance(member, CollectiveOperation) or _depends(member):
            raise NotAheadError
        key = (member.group, type(member), member.in_parts, size_bytes)
        kind = self._kinds.setdefault(key, len(self._kinds))
        return TapedCollective(member, size_bytes, what.stream, kind)


class AheadRun:
    """The hosts of all rank classes, and the times of the collectives at which they meet.

    `_costs` has the network's number, the bytes and the time of each kind of collective.
    """

    def __init__(self, ranks: Sequence[Rank], rendezvous: Rendezvous, tapes: Tapes) -> None:
        self._ranks = ranks
        self._rendezvous = rendezvous
        self._first = ranks[0].rank_class
        self._all = tuple(each.rank_class.index for each in ranks)
        self._stream: int | None = None
        self._costs: dict[int, tuple[int, int, int]] = {}
        self._tracks = [_Track(each, tapes) for each in ranks]

    def forget_costs(self) -> None:
        """Forget the times of collectives, since links have become slower."""
        self._costs.clear()

    def drain(
        self,
        steps: Sequence[int],
        begin_ps: int,
        overflow_steps: frozenset[int],
        told: Callable[[int], object] | None = None,
    ) -> int:
        """Issue `steps` from `begin_ps` on; return when everything has finished.

        `told` is called with each step that has been issued.

        Raises:
            NotAheadError: times depend on events, or hosts do not match.
        """
        for rank in self._ranks:
            rank.start_at(begin_ps)
        for step in steps:
            hosts = [each.host(step, overflow_steps) for each in self._tracks]
            if len(hosts) == 1:
                self._run_one(hosts[0], step)
            else:
                self._run(hosts, step)
            if told is not None:
                told(step)
        return max(rank.drained_ps() for rank in self._ranks)

    def _run_one(self, host: Going, step: int) -> None:
        """Let the only host issue one step."""
        counts: dict[int, int] = {}
        arrived = next(host, None)
        send = host.send
        with suppress(StopIteration):
            while arrived is not None:
                ready_ps, meeting = arrived
                arrived = send(ready_ps + self._taken_ps(meeting, counts))
        self._count(counts, step)

    def _run(self, hosts: Sequence[Going], step: int) -> None:
        """Let the hosts issue one step; they meet at every collective."""
        counts: dict[int, int] = {}
        arrived = [next(host, None) for host in hosts]
        sends = [host.send for host in hosts]
        while (first := arrived[0]) is not None:
            ready_ps, meeting = first
            member = meeting.member
            for other in arrived:
                if other is None or other[1].member is not member:
                    raise NotAheadError
                ready_ps = max(ready_ps, other[0])
            end_ps = ready_ps + self._taken_ps(meeting, counts)
            for index, send in enumerate(sends):
                try:
                    arrived[index] = send(end_ps)
                except StopIteration:
                    arrived[index] = None
        if any(arrived):
            raise NotAheadError
        self._count(counts, step)

    def _taken_ps(self, meeting: TapedCollective, counts: dict[int, int]) -> int:
        """Return the time of a collective that has the network to itself; count it."""
        kind = meeting.kind
        counts[kind] = counts.get(kind, 0) + 1
        found = self._costs.get(kind)
        if found is None or meeting.stream != self._stream:
            found = self._costs[kind] = self._cost(meeting)
        return found[2]

    def _cost(self, meeting: TapedCollective) -> tuple[int, int, int]:
        """Return the network's number, the bytes and the time of a collective.

        Raises:
            NotAheadError: collectives run on several streams or among some ranks, and may overlap.
        """
        if self._stream is None:
            self._stream = meeting.stream
        rank_class, member, size_bytes = self._first, meeting.member, meeting.size_bytes
        is_whole = rank_class.communicators[member.group].classes == self._all
        if self._stream != meeting.stream or not is_whole:
            raise NotAheadError
        number, taken_ps = self._rendezvous.ring(rank_class, member, size_bytes)
        if size_bytes:
            taken_ps += self._rendezvous.network.alone_ps(number, size_bytes)
        return number, size_bytes, taken_ps

    def _count(self, counts: dict[int, int], step: int) -> None:
        """Add the bytes of the collectives of `step` to the bytes moved on the network."""
        for kind, times in counts.items():
            number, size_bytes, _ = self._costs[kind]
            if size_bytes:
                self._rendezvous.network.count(number, step, times * size_bytes)


class _Track:
    """The host of one rank class, and the times at which its streams are free.

    `_could_ps` is when a stream could have run more; waits without an operation are not work.
    """

    def __init__(self, rank: Rank, tapes: Tapes) -> None:
        self._rank = rank
        self._tapes = tapes
        self._free_ps = [0] * len(rank.program.streams)
        self._could_ps = self._free_ps.copy()

    def host(self, step: int, overflow_steps: frozenset[int]) -> Going:
        """Issue setup or a step; yield at each collective, and receive its end."""
        rank = self._rank
        instance = rank.open(step, overflow_steps)
        for stretch, entries in self._tapes.of(instance.course):
            begin_ps = rank.host_ps
            yield from self._run(entries, instance, begin_ps)
            rank.host_ps += stretch.length_ps
            for name, offset_ps in stretch.notes_ps:
                instance.noted[name] = begin_ps + offset_ps
            instance.issuing.append((begin_ps, rank.host_ps))
            if stretch.stop is not None:
                after = stretch.stop.after
                ended = [_known_ps(instance, slot) for slot in after.here]
                waited = rank.earlier(after.earlier)
                ended += [_known_ps(where, slot) for where, slot in waited]
                rank.host_ps = max([rank.host_ps, *ended])
            for slot in stretch.skipped:
                instance.ends[slot] = 0
        rank.close(instance)

    def _run(self, entries: Sequence[Entry], instance: ProgramRun, begin_ps: int) -> Going:
        """Run the entries of a stretch in order."""
        rank, end_of = self._rank, self._rank.end_ps
        starts, ends = instance.starts, instance.ends
        all_free_ps, all_could_ps = self._free_ps, self._could_ps
        for item, slot, stream, time_ps, offset_ps, here, looks_back, is_work, meeting in entries:
            free_ps, could_ps = all_free_ps[stream], all_could_ps[stream]
            start_ps = issued_ps = begin_ps + offset_ps
            if free_ps > issued_ps:
                start_ps = free_ps
            if here or looks_back:
                after_ps = 0
                for other in here:
                    end_ps = ends[other]
                    if end_ps < 0:
                        raise NotAheadError
                    after_ps = max(after_ps, end_ps)
                if looks_back:
                    for where, other in rank.links(item):
                        after_ps = max(after_ps, _known_ps(where, other))
                could_ps = max(could_ps, after_ps)
                start_ps = max(start_ps, after_ps)
            if could_ps < issued_ps and is_work:
                name = rank.program.streams[stream]
                instance.late.setdefault(name, []).append((could_ps, issued_ps))
            starts[slot] = start_ps
            if meeting is not None:
                end_ps = yield start_ps, meeting
            elif end_of is None:
                end_ps = start_ps + time_ps
            else:
                end_ps = end_of(instance, item, start_ps)
            ends[slot] = all_free_ps[stream] = end_ps
            all_could_ps[stream] = end_ps if is_work else could_ps


def _known_ps(instance: ProgramRun, slot: int) -> int:
    """Return the end of `slot`; raise NotAheadError if it is not known yet."""
    end_ps = instance.ends[slot]
    if end_ps < 0:
        raise NotAheadError
    return end_ps


def _depends(member: CollectiveOperation) -> bool:
    """Return True if the time depends on all ranks, or kernels lose multiprocessors.

    With unequal blocks, all ranks determine the time. A library takes multiprocessors on any GPU.
    """
    return isinstance(member, AllToAll) and (bool(member.sent) or member.by is not None)
