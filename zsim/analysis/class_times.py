"""Time that the first rank spends on each class of operations, step by step."""

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
"""Time of a step in which the rank neither computes nor copies."""

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
    Action.COMPRESS: "compression",
    Action.DECOMPRESS: "compression",
    Action.RESIDUAL: "compression",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassTime:
    """Seconds per step of one class of operations: the minimum and the median over the steps."""

    name: str
    lowest_s: float
    median_s: float


def class_of(operation: Operation) -> str | None:
    """Return the class of an operation, or None if it occupies no stream."""
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
    """Return the times of the whole step, of its time without computation, and of each class.

    The first `warm_up` steps are skipped. The time of a class is the sum over its operations, even
    if they overlap others. A collective lasts from the moment the rank reaches it until the rank
    observes its end.
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
