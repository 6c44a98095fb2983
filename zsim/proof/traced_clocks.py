"""Clocks of ranks, related only by data: received data must have been in flight by then.

Ranks may have started their clocks at different times. The search is for shifts of the clocks
under which no collective ends on a rank before all ranks whose data it needs could have started
it. There are none if and only if, along a cycle of ranks, each ended an operation before the next
started it.

A rank cannot have started a collective before its earlier computations had ended. The recorded
start is not used, since backends may record a start late. Relaxation of Bellman and Ford, over
ranks.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.proof.traced_rank import Instance, TracedRank
from zsim.proof.traced_time import LONG_AGO, Times
from zsim.schedule.operation import Broadcast, Communication, Receive, Send, Together
from zsim.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Met:
    """Places in the list of ranks that gave data to an operation, and that received data from it.

    `gave` has place, operation and earliest start, `took` place, operation and end.
    """

    gave: tuple[tuple[int, Instance, int], ...]
    took: tuple[tuple[int, Instance, int], ...]


@dataclass(frozen=True, slots=True)
class Impossible:
    """A cycle of ranks: each ended an operation before the next could have started it."""

    steps: tuple[tuple[str, Instance, str, Instance], ...]


def impossible(
    schedule: Schedule, ranks: Sequence[TracedRank], times: Sequence[Times]
) -> Impossible | None:
    """Return a cycle that no shifts of clocks explain; None if the clocks can be shifted."""
    met = list(_met(schedule, ranks, times))
    shift_ps = [0] * len(ranks)
    because: list[tuple[int, Instance, Instance] | None] = [None] * len(ranks)
    changed = -1
    for _ in range(len(ranks) + 1):
        changed = -1
        for each in met:
            giver, given, begin_ps = max(each.gave, key=lambda one: shift_ps[one[0]] + one[2])
            begin_ps += shift_ps[giver]
            for taker, taken, end_ps in each.took:
                if shift_ps[taker] + end_ps < begin_ps and taker != giver:
                    shift_ps[taker] = begin_ps - end_ps
                    because[taker] = (giver, given, taken)
                    changed = taker
        if changed < 0:
            return None
    return _cycle(ranks, because, changed)


def _cycle(
    ranks: Sequence[TracedRank],
    because: Sequence[tuple[int, Instance, Instance] | None],
    start: int,
) -> Impossible:
    """Follow the reasons back, which lead into a cycle."""
    seen: dict[int, int] = {}
    steps: list[tuple[str, Instance, str, Instance]] = []
    place = start
    while place not in seen:
        seen[place] = len(steps)
        reason = because[place]
        assert reason is not None
        giver, given, taken = reason
        steps.append((ranks[place].name, taken, ranks[giver].name, given))
        place = giver
    return Impossible(tuple(steps[seen[place] :]))


def _met(schedule: Schedule, ranks: Sequence[TracedRank], times: Sequence[Times]) -> Iterator[Met]:
    """Yield every operation with several ranks, matched as communicators do."""
    queues: dict[tuple[str, tuple[int, ...]], list[tuple[int, list[_Part]]]] = defaultdict(list)
    for place, (rank, timed) in enumerate(zip(ranks, times, strict=True)):
        coordinates = schedule.mesh.coordinates(rank.trace.rank)
        parts: dict[str, list[_Part]] = defaultdict(list)
        for group, part in _parts(rank, timed):
            parts[group].append(part)
        for group, issued in parts.items():
            members = schedule.group_by_name[group].members(schedule.mesh, coordinates)
            queues[group, members].append((place, issued))
    for (_, members_of), queue in queues.items():
        if len(queue) > 1:
            yield from _collectives(queue, members_of, ranks)
            yield from _sends(queue, members_of, ranks)


@dataclass(frozen=True, slots=True)
class _Part:
    """Times of a rank for one operation of a communicator; without an event, no end."""

    operation: Communication
    instance: Instance
    begin_ps: int
    end_ps: int | None


def _parts(rank: TracedRank, timed: Times) -> Iterator[tuple[str, _Part]]:
    for step, operation in rank.entries:
        if not isinstance(operation, Communication | Together):
            continue
        instance = (step, operation.id)
        event = rank.events.get(instance)
        members = operation.members if isinstance(operation, Together) else (operation,)
        for member in members:
            end_ps = None if event is None else event.end_ps
            begin_ps = timed.computed_ps.get(instance, LONG_AGO)
            yield member.group, _Part(member, instance, begin_ps, end_ps)


def _collectives(
    queue: Sequence[tuple[int, list[_Part]]], members: tuple[int, ...], ranks: Sequence[TracedRank]
) -> Iterator[Met]:
    """Match the k-th collectives of all ranks."""
    whole = [
        (place, [part for part in parts if not isinstance(part.operation, Send | Receive)])
        for place, parts in queue
    ]
    for number in range(min(len(parts) for _, parts in whole)):
        these = [(place, parts[number]) for place, parts in whole]
        gave = [(place, part.instance, part.begin_ps) for place, part in these]
        first = these[0][1].operation
        if isinstance(first, Broadcast):
            root = members[first.root]
            gave = [each for each in gave if ranks[each[0]].trace.rank == root]
        yield from _known(gave, these)


def _sends(
    queue: Sequence[tuple[int, list[_Part]]], members: tuple[int, ...], ranks: Sequence[TracedRank]
) -> Iterator[Met]:
    """Match the k-th send from one rank to another with the k-th receive there."""
    sent: dict[tuple[int, int], list[tuple[int, _Part]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[int, _Part]]] = defaultdict(list)
    for place, parts in queue:
        own = members.index(ranks[place].trace.rank)
        for part in parts:
            operation = part.operation
            if isinstance(operation, Send):
                sent[own, (own + operation.offset) % len(members)].append((place, part))
            elif isinstance(operation, Receive):
                received[(own + operation.offset) % len(members), own].append((place, part))
    for key, sends in sent.items():
        for (place, part), taker in zip(sends, received.get(key, ()), strict=False):
            yield from _known([(place, part.instance, part.begin_ps)], [taker])


def _known(
    gave: Sequence[tuple[int, Instance, int]], took: Sequence[tuple[int, _Part]]
) -> Iterator[Met]:
    """Yield the known times of an operation: a rank without an event has no end."""
    begun = tuple(each for each in gave if each[2] > LONG_AGO)
    ended = tuple(
        (place, part.instance, part.end_ps) for place, part in took if part.end_ps is not None
    )
    if begun and ended:
        yield Met(begun, ended)
