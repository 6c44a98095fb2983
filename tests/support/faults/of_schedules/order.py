"""Order: edges that are gone, collectives in another order, branches that ranks take apart."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from faults.changes import Edit
from faults.fault import Mutant
from faults.schedules import changed, edited, exchanged, moved, places, split, target_of, without
from faults.selections import in_step, on_streams
from zsim.network.volume import communications
from zsim.schedule.operation import (
    AllGather,
    Allocate,
    Branch,
    Edge,
    Free,
    Operation,
    StreamOperation,
    walk,
)
from zsim.schedule.schedule import Schedule

REACH = 3
"""A collective changes places with one of the next so many of its group."""


def without_an_edge(schedule: Schedule) -> Iterator[Edit]:
    """Drop an edge of `after`, of the uses of a free, or of those that a branch waits for."""
    for operation in in_step(schedule):
        edges: tuple[Edge, ...] = ()
        field = "after"
        if isinstance(operation, Free):
            field, edges = "uses", operation.uses
        elif isinstance(operation, StreamOperation | Branch):
            edges = operation.after
        for place, edge in enumerate(edges):
            left: dict[str, Any] = {field: (*edges[:place], *edges[place + 1 :])}
            where = operation.id, target_of(edge)
            make = partial(changed, schedule, operation.id, **left)
            yield Mutant(f"{where[0]} without {field} {where[1]}", make, where)


def collectives_swapped(schedule: Schedule) -> Iterator[Edit]:
    """Exchange two collectives on some ranks."""
    for at in places(schedule)[:1]:
        collectives = [each for each in on_streams(schedule) if communications(each)]
        for number, one in enumerate(collectives):
            for other in collectives[number + 1 : number + 1 + REACH]:
                make = partial(_swapped, schedule, at, one, other)
                text = f"{one.id} and {other.id} swapped at {at}"
                yield Mutant(text, make, (one.id, other.id))


def _swapped(schedule: Schedule, at: tuple[str, int], one: Operation, other: Operation) -> Schedule:
    return split(schedule, exchanged(schedule, one, other), axis=at[0], place=at[1])


def prefetched(schedule: Schedule) -> Iterator[Edit]:
    """Issue a gather before its turn."""
    operations = in_step(schedule)
    for number, gather in enumerate(operations):
        if not isinstance(gather, AllGather):
            continue
        buffer = gather.target.buffer
        allocations = [
            place
            for place, each in enumerate(operations[:number])
            if isinstance(each, Allocate) and each.buffer == buffer
        ]
        for first in allocations[-1:]:
            allocation = operations[first]
            earlier = [each for each in operations[:first] if isinstance(each, StreamOperation)]
            for ahead in (3, 10, 30, 60):
                if len(earlier) >= ahead:
                    names, at = (allocation.id, gather.id), earlier[-ahead].id
                    make = partial(moved, schedule, *names, before=at)
                    yield Mutant(f"{gather.id} before {at}", make, (*names, buffer))


def branched_apart(schedule: Schedule) -> Iterator[Edit]:
    """Take a branch, or do not, on one rank whatever the flag says; or do not wait for it."""
    for branch in in_step(schedule):
        if not isinstance(branch, Branch):
            continue
        where = (branch.id, *(each.id for each in (*branch.then, *branch.otherwise)))
        for axis, place in places(schedule):
            text = f"at {axis} {place} {branch.id}"
            for side in ("then", "otherwise"):
                make = partial(_always, schedule, (axis, place), branch, side)
                yield Mutant(f"{text}: always {side}", make, where)
            make = partial(_the_other_way, schedule, (axis, place), branch)
            yield Mutant(f"{text}: the other way", make, where)
        for edge in branch.after:
            name = target_of(edge)
            make = partial(without, schedule, name)
            yield Mutant(f"{branch.id} without {name}", make, (branch.id, name))


def _always(schedule: Schedule, at: tuple[str, int], branch: Branch, side: str) -> Schedule:
    """Return the schedule in which one rank always takes a side; the other side is gone there."""
    taken, other = branch.then, branch.otherwise
    if side == "otherwise":
        taken, other = other, taken
    kept = without(schedule, *(each.id for each in walk(other)))
    there = edited(kept, lambda each: taken if each.id == branch.id else (each,))
    return split(schedule, there, axis=at[0], place=at[1])


def _the_other_way(schedule: Schedule, at: tuple[str, int], branch: Branch) -> Schedule:
    there = changed(schedule, branch.id, then=branch.otherwise, otherwise=branch.then)
    return split(schedule, there, axis=at[0], place=at[1])
