"""Fit costs of operations in training to events of reference steps. Does not import torch.

The cost of an operation is a constant, plus a constant per kernel, plus multiples of the times of
its products and of its other kernels when measured alone. All coefficients are at least 0. The fit
tries every subset of terms and keeps the one with the smallest relative error.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from statistics import median

import numpy as np
from numpy.typing import NDArray

from zsim.cluster.profile.measured import (
    OTHER,
    HostTimes,
    MeasuredTimes,
    OperationCost,
)
from zsim.compute.roofline import cost_name, kernel_sums
from zsim.schedule.operation import (
    Communication,
    Compute,
    Copy,
    Fill,
    Operation,
    Together,
    walk,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.trace import RankTrace
from zsim.units import PICOSECONDS_PER_SECOND

WARM_UP = 2
"""Number of first steps of a run that are ignored."""

Floats = NDArray[np.float64]
RUN_HERE = (Compute, Copy, Fill)
HANDED_OVER = (Communication, Together)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTrace:
    """A trace of one rank of a reference run, and its schedule."""

    schedule: Schedule
    trace: RankTrace

    @property
    def program(self) -> Program:
        """Return the program of the rank."""
        return self.schedule.program_of(self.trace.rank)


def not_negative(features: Sequence[Sequence[float]], taken: Sequence[float]) -> tuple[float, ...]:
    """Return non-negative factors of `features` with the smallest relative error in `taken`."""
    given: Floats = np.asarray(features, np.float64)
    seconds: Floats = np.asarray(taken, np.float64)
    rows, target = given / seconds[:, None], np.ones(len(seconds))
    count = given.shape[1]
    best, least = np.zeros(count), float("inf")
    places = range(count)
    for chosen in chain.from_iterable(combinations(places, size) for size in range(1, count + 1)):
        columns = list(chosen)
        if not rows[:, columns].any(axis=0).all():
            continue
        found = np.linalg.lstsq(rows[:, columns], target, rcond=None)[0]
        if (found < 0).any():
            continue
        error = float(np.square(rows[:, columns] @ found - target).sum())
        if error < least * (1 - 1e-9):
            least, best = error, np.zeros(count)
            best[columns] = found
    return tuple(float(each) for each in best)


def fitted_costs(runs: Iterable[ReferenceTrace], times: MeasuredTimes) -> tuple[OperationCost, ...]:
    """Return the cost of each action in the runs, and of operations that only move bytes."""
    rows: defaultdict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        operations = {each.id: each for each in walk(run.program.step)}
        durations = _durations(run.trace, operations)
        for name, seconds in durations.items():
            operation = operations.get(name)
            if not isinstance(operation, RUN_HERE):
                continue
            sums = kernel_sums(operation, run.program, times)
            row = (1.0, float(sums.count), sums.product_s, sums.moving_s)
            names = [cost_name(operation)]
            if not sums.count:
                names.append(OTHER)
            for each in names:
                rows[each].append(row)
                taken[each].append(seconds)
    return tuple(
        _cost(name, not_negative(rows[name], taken[name])) for name in sorted(rows) if rows[name]
    )


def _cost(name: str, factors: tuple[float, ...]) -> OperationCost:
    own_s, kernel_s, product, moving = factors
    return OperationCost(name=name, own_s=own_s, kernel_s=kernel_s, product=product, moving=moving)


def _durations(trace: RankTrace, operations: Mapping[str, Operation]) -> dict[str, float]:
    """Return the median seconds of each operation over the steps after the warm-up.

    Only operations without a concurrent collective count, since a collective slows them down.
    """
    flown: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in trace.events:
        if isinstance(operations.get(event.operation), HANDED_OVER):
            flown[event.step].append((event.start_ps, event.end_ps))
    found: defaultdict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        beside = any(
            begin < event.end_ps and event.start_ps < end for begin, end in flown[event.step]
        )
        if event.step >= WARM_UP and not beside:
            taken = (event.end_ps - event.start_ps) / PICOSECONDS_PER_SECOND
            found[event.operation].append(max(taken, 1e-9))
    return {name: median(each) for name, each in found.items()}


def fitted_host(runs: Iterable[ReferenceTrace], issue_s: float) -> HostTimes:
    """Return the overhead on the host of operations that the host runs itself.

    That is the time between two consecutive operations without a wait in between. `issue_s` is used
    for a collective if none was issued in such a gap.
    """
    rows: list[tuple[float, float, float]] = []
    taken: list[float] = []
    loops: list[tuple[int, float]] = []
    for run in runs:
        loops += [(_operations_around(run.program), each) for each in _between_steps(run.trace)]
        for between, seconds in _gaps(run):
            rows.append((1.0, *between))
            taken.append(seconds)
    if not rows:
        return HostTimes(stream_s=0.0, collective_s=issue_s, book_s=0.0)
    stream_s, collective_s, book_s = not_negative(rows, taken)
    hands_over = any(row[1] for row in rows)
    return HostTimes(
        stream_s=stream_s,
        collective_s=collective_s if hands_over else issue_s,
        book_s=book_s,
        step_s=max(
            0.0, median([each - stream_s - book_s * ahead for ahead, each in loops] or [0.0])
        ),
    )


def _operations_around(program: Program) -> int:
    """Return the number of operations that the host records at the edges of a step.

    They are those before the first event and after the last one. An issued collective is an event
    here, since issuing it takes as long as several records.
    """
    events = [isinstance(each, (*RUN_HERE, *HANDED_OVER)) for each in walk(program.step)]
    if True not in events:
        return len(events)
    return events.index(True) + events[::-1].index(True)


def _between_steps(trace: RankTrace) -> Iterator[float]:
    """Yield the seconds from the end of each step to the start of the next."""
    spans: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in trace.events:
        spans[event.step].append((event.start_ps, event.end_ps))
    for step in sorted(spans):
        if step >= WARM_UP:
            begin, end = min(spans[step])[0], max(span[1] for span in spans[step - 1])
            yield max(0, begin - end) / PICOSECONDS_PER_SECOND


def _gaps(run: ReferenceTrace) -> Iterator[tuple[tuple[float, float], float]]:
    """Yield the collectives and other operations in each gap, and the gap's seconds."""
    by_step: defaultdict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    for event in run.trace.events:
        by_step[event.step][event.operation] = event.start_ps, event.end_ps
    order = list(walk(run.program.step))
    found: defaultdict[str, list[float]] = defaultdict(list)
    between: dict[str, tuple[float, float]] = {}
    handed = {each.id for each in order if isinstance(each, HANDED_OVER)}
    for step, spans in by_step.items():
        if step < WARM_UP:
            continue
        landed = sorted(spans[name][1] for name in handed if name in spans)
        before: int | None = None
        collectives = others = 0
        for operation in order:
            if isinstance(operation, HANDED_OVER):
                collectives += 1
            elif not isinstance(operation, RUN_HERE):
                others += 1
            elif operation.id in spans:
                start, end = spans[operation.id]
                if before is not None and not any(before < each <= start for each in landed):
                    found[operation.id].append(max(start - before, 1) / PICOSECONDS_PER_SECOND)
                    between[operation.id] = collectives, others
                before, collectives, others = end, 0, 0
    for name, seconds in found.items():
        yield between[name], median(seconds)
