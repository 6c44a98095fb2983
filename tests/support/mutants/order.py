"""Two collectives change places on some ranks; a gather is issued before its turn on all."""

from collections.abc import Iterable, Iterator
from functools import partial

from mutation import edited

from mutants.mutant import Mutant, Operator, apart, in_step, on_streams, one_rank_apart
from zsim.network.volume import communications
from zsim.schedule.operation import AllGather, Allocate, Operation, StreamOperation
from zsim.schedule.schedule import Schedule

REACH = 3
"""A collective changes places with one of the next so many of its group."""


def swapped(schedule: Schedule, one: Operation, other: Operation) -> Schedule:
    """The schedule with each of two operations in the other's place."""
    places = {one.id: other, other.id: one}
    return edited(schedule, lambda each: (places.get(each.id, each),))


def swaps(schedule: Schedule) -> Iterator[Mutant]:
    place = next(apart(schedule), None)
    if place is None:
        return
    collectives = [each for each in on_streams(schedule) if communications(each)]
    for number, one in enumerate(collectives):
        for other in collectives[number + 1 : number + 1 + REACH]:
            yield Mutant((one.id, other.id), partial(_diverging, schedule, place, one, other))


def _diverging(
    schedule: Schedule, place: tuple[str, int], one: Operation, other: Operation
) -> Schedule:
    return one_rank_apart(schedule, swapped(schedule, one, other), *place)


def prefetches(schedule: Schedule) -> Iterator[Mutant]:
    operations = list(in_step(schedule))
    gathers = [each for each in operations if isinstance(each, AllGather)]
    for gather in gathers:
        place = operations.index(gather)
        allocation = next(
            (
                each
                for each in reversed(operations[:place])
                if isinstance(each, Allocate) and each.buffer == gather.target.buffer
            ),
            None,
        )
        if allocation is None:
            continue
        first = operations.index(allocation)
        earlier = [each for each in operations[:first] if isinstance(each, StreamOperation)]
        for ahead in (3, 10, 30, 60):
            if len(earlier) >= ahead:
                moved = {allocation.id, gather.id}
                make = partial(_earlier, schedule, moved, (allocation, gather), earlier[-ahead].id)
                yield Mutant((allocation.id, gather.id, gather.target.buffer), make)


def _earlier(
    schedule: Schedule, names: set[str], moved: tuple[Operation, ...], before: str
) -> Schedule:
    def edit(each: Operation) -> Iterable[Operation]:
        if each.id in names:
            return ()
        return (*moved, each) if each.id == before else (each,)

    return edited(schedule, edit)


SWAP_COLLECTIVES = Operator(
    "swap two collectives in one role",
    frozenset({"matching", "progress", "races", "value", "definedness", "order", "placement"})
    | {"lifetime"},
    swaps,
)
PREFETCH = Operator(
    "prefetch past the cap",
    frozenset({"memory", "volume", "lifetime", "races", "progress", "value"}),
    prefetches,
)
