"""Two runs side by side, the largest difference first: figures, sorts of operations, operations.

Everything is read off the two traces, of the rank with the largest book for memory and of the first
rank for the rest, in the last step; so a simulation and a real run compare like any other two. Two
operations are the same if they have the same path.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from zsim.analysis.summary import last_step
from zsim.memory import peak, pools
from zsim.prediction.predicted_error import ratio_half_width
from zsim.trace.trace import StepError, Trace
from zsim.units import PICOSECONDS_PER_SECOND


class Measure(StrEnum):
    """Unit of a number."""

    SECONDS = "s"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A number of each of two runs: `first` and `second`, in `measure`; 0 where a run has none.

    `whole` is what it is a part of: the longer step, or the larger of all peaks or sums of bytes.
    """

    name: str
    measure: Measure
    first: float
    second: float
    whole: float = 0.0

    @property
    def change(self) -> float:
        """Second number less the first."""
        return self.second - self.first

    @property
    def weight(self) -> float:
        """The difference as a share of the whole that it is part of."""
        return abs(self.change) / self.whole if self.whole else 0.0

    @property
    def relative(self) -> float | None:
        """The change as a share of the first; None if that is 0."""
        return self.change / self.first if self.first else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs: figures, sorts of operations and operations, each the largest difference first.

    Attributes:
        step: the time of a step.
        figures: where its time goes by stream, memory by kind, bytes by group.
        sorts: time of all operations of a phase and kind together, such as "backward reduce".
        operations: time of each operation that both have.
        only_first, only_second: how many operations one has alone.
    """

    step: Difference
    figures: tuple[Difference, ...]
    sorts: tuple[Difference, ...]
    operations: tuple[Difference, ...]
    only_first: int
    only_second: int


def compare(first: Trace, second: Trace) -> Comparison:
    """Return `first` and `second` side by side."""
    sides = (first, second)
    times = [_operations(trace) for trace in sides]
    both = [name for name in times[0] if name in times[1]]
    steps = [(end - begin) / PICOSECONDS_PER_SECOND for begin, end in map(last_step, sides)]
    step = Difference(name="step time", measure=Measure.SECONDS, first=steps[0], second=steps[1])
    of_steps = max(steps)
    figures = [
        *_paired(Measure.SECONDS, [_busy(trace) for trace in sides], of_steps),
        *_paired(Measure.BYTES, [_memory(trace) for trace in sides]),
        *_paired(Measure.BYTES, [_moved(trace) for trace in sides]),
    ]
    sorts = _paired(Measure.SECONDS, [_summed(each) for each in times], of_steps)
    alike = [{name: each[name] for name in both} for each in times]
    return Comparison(
        step=step,
        figures=_ordered(figures),
        sorts=_ordered(sorts),
        operations=_ordered(_paired(Measure.SECONDS, alike, of_steps)),
        only_first=len(times[0]) - len(both),
        only_second=len(times[1]) - len(both),
    )


def counts(relative: float, one: StepError | None, other: StepError | None) -> bool | None:
    """Return True if two step times differ by more than the error of their ratio.

    The second is longer by `relative`, as a share of the first. None if an error is unknown.
    """
    error = ratio_error(one, other)
    if error is None:
        return None
    ratio = 1 + relative
    return ratio <= 0 or max(ratio, 1 / ratio) > 1 + error


def ratio_error(one: StepError | None, other: StepError | None) -> float | None:
    """Return the error of the ratio of two step times; None if one of theirs is unknown."""
    return None if one is None or other is None else ratio_half_width(one, other)


def _ordered(found: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(found, key=lambda each: -each.weight))


def _paired(
    measure: Measure, sides: list[dict[str, float]], whole: float | None = None
) -> list[Difference]:
    """Return numbers of two runs by name; without `whole` they are parts of their larger sum."""
    if whole is None:
        whole = max(sum(side.values()) for side in sides)
    names = dict.fromkeys(name for side in sides for name in side)
    return [
        Difference(
            name=name,
            measure=measure,
            first=sides[0].get(name, 0.0),
            second=sides[1].get(name, 0.0),
            whole=whole,
        )
        for name in names
    ]


def _operations(trace: Trace) -> dict[str, float]:
    """Return seconds of each operation of the last step of the first rank."""
    found: dict[str, float] = {}
    for event in trace.ranks[0].events:
        if event.step == trace.steps - 1:
            taken = (event.end_ps - event.start_ps) / PICOSECONDS_PER_SECOND
            found[event.operation] = found.get(event.operation, 0.0) + taken
    return found


def _summed(times: Mapping[str, float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for path, seconds in times.items():
        name = sort_of(path)
        found[name] = found.get(name, 0.0) + seconds
    return found


def sort_of(path: str) -> str:
    """Return phase and kind of an operation: "backward reduce" of "step/backward/mb1/reduce3"."""
    parts = path.split("/")
    phase = parts[1] if len(parts) > 2 else ""
    return f"{phase} {re.sub(r'[0-9]+$', '', parts[-1])}".strip()


def _busy(trace: Trace) -> dict[str, float]:
    """Return seconds in which each stream of the first rank does something of the last step."""
    reached: dict[str, int] = {}
    found: dict[str, float] = {}
    last = [event for event in trace.ranks[0].events if event.step == trace.steps - 1]
    for event in sorted(last, key=lambda each: each.start_ps):
        start, stop = max(event.start_ps, reached.get(event.stream, event.start_ps)), event.end_ps
        if stop > start:
            name = f"stream {event.stream} busy"
            found[name] = found.get(name, 0.0) + (stop - start) / PICOSECONDS_PER_SECOND
            reached[event.stream] = stop
    return found


def _memory(trace: Trace) -> dict[str, float]:
    """Return bytes by kind where the book of a pool is largest, of the rank with the largest."""
    largest = {
        pool: max((peak(rank.book, pool) for rank in trace.ranks), key=lambda each: each.bytes)
        for pool in pools(entry for rank in trace.ranks for entry in rank.book)
    }
    return {
        f"{pool} memory at its peak, {kind}": float(size)
        for pool, found in largest.items()
        for kind, size in found.by_kind
        if size
    }


def _moved(trace: Trace) -> dict[str, float]:
    """Return ring-equivalent bytes that the first rank hands to each group in the last step."""
    found: dict[str, float] = {}
    for transfer in trace.ranks[0].transfers:
        if transfer.step == trace.steps - 1:
            name = f"{transfer.collective} on {transfer.group}"
            found[name] = found.get(name, 0.0) + transfer.bytes
    return found
