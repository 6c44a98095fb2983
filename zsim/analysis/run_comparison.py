"""Compare two runs, largest difference first: figures, sorts of operations, operations.

All numbers come from the last step of the two traces, so a simulation compares with a real run.
Memory is that of the rank with the highest peak; everything else is that of the first rank. Two
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
    """A number of two runs, `first` and `second`, in `measure`; 0 if a run lacks it.

    `whole` is the total that the number is part of: the longer step time, or the larger sum of
    bytes.
    """

    name: str
    measure: Measure
    first: float
    second: float
    whole: float = 0.0

    @property
    def change(self) -> float:
        """Second number minus the first."""
        return self.second - self.first

    @property
    def weight(self) -> float:
        """Absolute change as a share of `whole`; 0 if `whole` is 0."""
        return abs(self.change) / self.whole if self.whole else 0.0

    @property
    def relative(self) -> float | None:
        """Change as a share of the first number; None if that is 0."""
        return self.change / self.first if self.first else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences between two runs; each tuple lists the largest difference first.

    Attributes:
        step: step time.
        figures: busy time by stream, peak memory by kind, and bytes by group.
        sorts: total time of the operations of one phase and kind, such as "backward reduce".
        operations: time of each operation that both runs have.
        only_first, only_second: number of operations that only one of the runs has.
    """

    step: Difference
    figures: tuple[Difference, ...]
    sorts: tuple[Difference, ...]
    operations: tuple[Difference, ...]
    only_first: int
    only_second: int


def compare(first: Trace, second: Trace) -> Comparison:
    """Return the comparison of the last steps of `first` and `second`."""
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

    The second is longer than the first by the share `relative`. Return None if an error is unknown.
    """
    error = ratio_error(one, other)
    if error is None:
        return None
    ratio = 1 + relative
    return ratio <= 0 or max(ratio, 1 / ratio) > 1 + error


def ratio_error(one: StepError | None, other: StepError | None) -> float | None:
    """Return the error of the ratio of two step times; None if either error is unknown."""
    return None if one is None or other is None else ratio_half_width(one, other)


def _ordered(found: Iterable[Difference]) -> tuple[Difference, ...]:
    return tuple(sorted(found, key=lambda each: -each.weight))


def _paired(
    measure: Measure, sides: list[dict[str, float]], whole: float | None = None
) -> list[Difference]:
    """Pair the numbers of two runs by name; `whole` defaults to the larger of the two sums."""
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
    """Return the seconds of each operation of the first rank in the last step."""
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
    """Return phase and kind of an operation: "backward reduce" for "step/backward/mb1/reduce3"."""
    parts = path.split("/")
    phase = parts[1] if len(parts) > 2 else ""
    return f"{phase} {re.sub(r'[0-9]+$', '', parts[-1])}".strip()


def _busy(trace: Trace) -> dict[str, float]:
    """Return the seconds that each stream of the first rank is busy in the last step."""
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
    """Return the bytes by pool and kind at the peak, for the rank with the highest peak."""
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
    """Return the ring-equivalent bytes that the first rank sends in each group in the last step."""
    found: dict[str, float] = {}
    for transfer in trace.ranks[0].transfers:
        if transfer.step == trace.steps - 1:
            name = f"{transfer.collective} on {transfer.group}"
            found[name] = found.get(name, 0.0) + transfer.bytes
    return found
