"""Waits of ranks for each other, from the traces of several ranks.

A collective ends on all ranks at once. So the rank that spends the least time in it began last, and
the others waited for it by what they spent more.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Final, NamedTuple

from zsim.units import format_seconds
from zsim_explain.trace.recorded_rank import DeviceWork, RecordedRank

APART_US: Final = 50.0
APART_SHARE: Final = 0.05
"""Ends of a collective may differ by this much, absolute or of its duration, in the median."""

Key = tuple[object, ...]


class Pairing(NamedTuple):
    """What several traces say of each other.

    Attributes:
        ranks: the ranks; their collectives are divided into a wait and the rest.
        paired: collectives found on all ranks; of `collectives` of the first rank.
        apart: microseconds by which ends differ, in the median, after clocks are set equal.
        waited: microseconds that all ranks waited, by the rank that was late.
        refused: why nothing is paired; empty if it is.
    """

    ranks: Sequence[RecordedRank]
    paired: int
    collectives: int
    apart: float
    waited: Mapping[int, float]
    refused: str = ""


def with_waits(ranks: Sequence[RecordedRank]) -> Pairing:
    """Return `ranks` with the waits of their collectives for the last rank."""
    tables = [_by_key(rank) for rank in ranks]
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    meetings = [
        met
        for key in keys
        if len({len(table[key]) for table in tables}) == 1
        for met in zip(*(table[key] for table in tables), strict=True)
    ]
    count = sum(map(len, tables[0].values()))
    if not meetings:
        why = "no collective is found in all of the traces; they must be of the same steps"
        return Pairing(ranks, 0, count, 0.0, {}, why)
    ends = [[each.end for each in met] for met in meetings]
    clocks = [median(each[index] - each[0] for each in ends) for index in range(len(ranks))]
    spreads = [
        _spread([end - clock for end, clock in zip(each, clocks, strict=True)]) for each in ends
    ]
    apart, least = median(spreads), median(min(map(_took, met)) for met in meetings)
    if apart > max(APART_US, APART_SHARE * least):
        us = format_seconds(apart / 1e6)
        why = f"the ends of collectives are {us} apart; records are missing, or steps differ"
        return Pairing(ranks, 0, count, apart, {}, why)
    waited: defaultdict[int, float] = defaultdict(float)
    waits: list[dict[DeviceWork, tuple[float, int]]] = [{} for _ in ranks]
    for met in meetings:
        shortest = min(range(len(met)), key=lambda index: _took(met[index]))
        last = ranks[shortest].rank
        for index, each in enumerate(met):
            if (wait := _took(each) - _took(met[shortest])) > 0:
                waits[index][each] = wait, last
                waited[last] += wait
    divided = [
        replace(rank, work=sorted(_divided(rank.work, found)))
        for rank, found in zip(ranks, waits, strict=True)
    ]
    return Pairing(divided, len(meetings), count, apart, waited)


def _by_key(rank: RecordedRank) -> dict[Key, list[DeviceWork]]:
    """Return the collectives of a rank by step, kind, group and size, in order."""
    found: defaultdict[Key, list[DeviceWork]] = defaultdict(list)
    steps = iter(rank.steps)
    step = next(steps)
    for each in rank.work:
        while each.start >= step.end and (after := next(steps, None)) is not None:
            step = after
        if each.collective is not None and step.start <= each.start < step.end:
            found[step.name, each.collective, each.pairing].append(each)
    return found


def _divided(
    work: Sequence[DeviceWork], waits: dict[DeviceWork, tuple[float, int]]
) -> Iterator[DeviceWork]:
    """Yield the work, with collectives that waited as two pieces."""
    for each in work:
        if (found := waits.get(each)) is None:
            yield each
            continue
        wait, last = found
        yield each._replace(end=each.start + wait, waits_for=last)
        yield each._replace(start=each.start + wait)


def _took(work: DeviceWork) -> float:
    return work.end - work.start


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)
