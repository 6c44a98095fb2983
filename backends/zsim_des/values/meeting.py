"""Matches the members of communicators: in every group by the order in which hosts issue them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic

from zsim.backend.values import A, Seat, Values
from zsim.schedule.access import accesses
from zsim.schedule.operation import Communication, PointToPoint, Receive, Send
from zsim.schedule.schedule import Schedule
from zsim_des.values.running import BlockAccess, Fault, Running


@dataclass(slots=True, eq=False)
class Seated(Generic[A]):
    """A member, with the windows that it reads and writes, if any."""

    member: Communication
    running: Running[A]
    source: BlockAccess[A] | None
    target: BlockAccess[A] | None


class Meeting(Generic[A]):
    """The members of one collective by their places in the group, or a Send and a Receive."""

    def __init__(self, needed: int) -> None:
        self._needed = needed
        self._seated: dict[int, Seated[A]] = {}
        self._ended = 0
        self._is_complete = False

    def take_seat(self, place: int, seated: Seated[A]) -> None:
        """Add a member that was issued."""
        self._seated[place] = seated

    @property
    def is_message(self) -> bool:
        """Return True if it is a Send and its Receive.

        Operations issued together with one of them can delay that one, so its end can be later.
        """
        return all(isinstance(one.member, PointToPoint) for one in self._seated.values())

    def ends(self) -> bool:
        """Record that one more member has ended; return True if this end may complete the meeting.

        A collective completes at its last end. A message completes at the earlier of its two ends,
        which may become known after the other one.
        """
        self._ended += 1
        return self.is_message or self._ended == self._needed

    def complete(self, values: Values[A]) -> Iterator[Fault]:
        """Write every member's result; yield a fault for each conflicting access of others.

        Later calls do nothing.
        """
        if self._is_complete:
            return
        self._is_complete = True
        seated = [self._seated[place] for place in sorted(self._seated)]
        for one in seated:
            one.running.begin(values)
        sources: list[A] = []
        for one in seated:
            windows = [each for each in (one.source, one.target) if each is not None]
            yield from one.running.foreign_writes(values, windows)
            if one.source is not None:
                assert one.source.before is not None
                sources.append(one.source.before)
        made = values.meet([one.member for one in seated], sources)
        for one, value in zip(seated, made, strict=True):
            if one.target is not None:
                values.store(one.target.now, value)


Spot = tuple[int, str, int, int]
"""Where members meet: first rank of the communicator, group, and for a pair source and target."""


class Meetings(Generic[A]):
    """Assigns every issued member its place in a meeting."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._open: dict[tuple[Spot, int], Meeting[A]] = {}
        self._counts: dict[tuple[int, Spot, bool], int] = {}
        self._members: dict[tuple[int, str], tuple[int, ...]] = {}

    def seat(self, running: Running[A], members: Iterable[Communication]) -> list[Meeting[A]]:
        """Add the members of one entry to their meetings; its windows are in order of members."""
        found: list[Meeting[A]] = []
        windows = iter(running.windows)
        for member in members:
            own = [next(windows) for _ in accesses(member)]
            source = None if isinstance(member, Receive) else own[0]
            target = None if isinstance(member, Send) else own[-1]
            spot, place, needed = self._spot(running.seat, member)
            counter = (running.seat.rank, spot, isinstance(member, Send))
            count = self._counts[counter] = self._counts.get(counter, 0) + 1
            meeting = self._open.get((spot, count))
            if meeting is None:
                meeting = self._open[spot, count] = Meeting(needed)
            meeting.take_seat(place, Seated(member, running, source, target))
            found.append(meeting)
        return found

    def _spot(self, seat: Seat, member: Communication) -> tuple[Spot, int, int]:
        """Return the meeting point of `member`, its place there, and the number of members."""
        ranks = self._ranks(seat, member.group)
        own = ranks.index(seat.rank)
        if not isinstance(member, Send | Receive):
            return (ranks[0], member.group, -1, -1), own, len(ranks)
        peer = (own + member.offset) % len(ranks)
        if isinstance(member, Send):
            return (ranks[0], member.group, own, peer), 0, 2
        return (ranks[0], member.group, peer, own), 1, 2

    def _ranks(self, seat: Seat, group: str) -> tuple[int, ...]:
        found = self._members.get((seat.rank, group))
        if found is None:
            of = self._schedule.group_by_name[group]
            found = of.members(self._schedule.mesh, seat.coordinates)
            self._members[seat.rank, group] = found
        return found
