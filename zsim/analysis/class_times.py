"""Times of a step by the class of its operations, of the first rank, step by step."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from zsim.schedule.operation import (
    BACKWARDS,
    Action,
    Communication,
    Compute,
    Copy,
    Operation,
    Read,
    Together,
    Write,
    walk,
)
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim.units import PICOSECONDS_PER_SECOND

STEP = "step"
WAITING = "no computation"
"""Time of a step in which the rank computes, copies and fills nothing."""

ACTIONS = {
    Action.FORWARD: "forward",
    Action.RECOMPUTE: "recompute",
    **dict.fromkeys(BACKWARDS, "backward"),
    Action.UPDATE: "update",
    Action.NORM: "norm, unscale, clip",
    Action.UNSCALE: "norm, unscale, clip",
    Action.CLIP: "norm, unscale, clip",
    Action.FINITE: "norm, unscale, clip",
    Action.AMAX: "scales",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """Seconds of a class of operations in a step: the lowest of some steps, and their median."""

    name: str
    lowest_s: float
    median_s: float


def class_of(operation: Operation) -> str | None:
    """Return the class of an operation; None of one that takes no time of a stream."""
    match operation:
        case Compute(action=action):
            return ACTIONS.get(action, "load, seed")
        case Read():
            return "reads"
        case Write():
            return "writes"
        case Copy():
            return "copies"
        case Communication():
            return operation.name.replace("_", "-")
        case Together(members=members):
            return members[0].name.replace("_", "-")
        case _:
            return None


def class_times(schedule: Schedule, trace: Trace, *, warm_up: int) -> tuple[ClassTime, ...]:
    """Return the step, what it computes nothing in, and each class, without the first steps.

    A class has the sum of its operations, whatever runs beside them; a collective goes from when
    the rank has reached it until the rank has learnt of its end.
    """
    rank = trace.ranks[0]
    classes = {
        each.id: name
        for each in walk(schedule.program_of(rank.rank).step)
        if (name := class_of(each)) is not None
    }
    here = {
        each.id
        for each in walk(schedule.program_of(rank.rank).step)
        if isinstance(each, Compute | Copy) and not isinstance(each, Read | Write)
    }
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0] * trace.steps)
    spans: list[list[tuple[int, int]]] = [[] for _ in range(trace.steps)]
    for event in rank.events:
        if event.step < 0:
            continue
        if event.operation in classes:
            taken = (event.end_ps - event.start_ps) / PICOSECONDS_PER_SECOND
            found[classes[event.operation]][event.step] += taken
        if event.operation in here:
            spans[event.step].append((event.start_ps, event.end_ps))
    steps = list(_steps_s(trace))
    waiting = [whole - _covered_s(each) for whole, each in zip(steps, spans, strict=True)]
    rows = {STEP: steps, WAITING: waiting, **found}
    return tuple(
        ClassTime(name=name, lowest_s=min(each[warm_up:]), median_s=median(each[warm_up:]))
        for name, each in rows.items()
    )


def _steps_s(trace: Trace) -> Iterator[float]:
    begin = 0
    for end in trace.step_end_ps:
        yield (end - begin) / PICOSECONDS_PER_SECOND
        begin = end


def _covered_s(spans: list[tuple[int, int]]) -> float:
    """Return the seconds that at least one of `spans` covers."""
    covered = reached = 0
    for start, end in sorted(spans):
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered / PICOSECONDS_PER_SECOND
