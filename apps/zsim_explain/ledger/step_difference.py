"""Why a step took longer than expected: at most eight causes, which add up to the difference."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final, NamedTuple

from zsim_explain.ledger.step_ledger import LedgerPart, StepLedger, TimeCause, ledger
from zsim_explain.trace.recorded_rank import RecordedRank

MOST: Final = 8
"""Causes that are named; the rest is one."""

OTHERS: Final = "all other causes"

NAMED_SHARE: Final = 0.7
"""One late rank is named if it causes more than this share of all waiting."""


class MeanStep(NamedTuple):
    """The mean step of a rank, in microseconds.

    Attributes:
        ledger: its ledger.
        took: its duration.
        spread: median absolute deviation of the durations of steps.
    """

    ledger: StepLedger
    took: float
    spread: float

    @property
    def own(self) -> float:
        """Time that depends on this rank alone: neither communication nor waits."""
        apart = LedgerPart.EXPOSED, LedgerPart.LATE
        return sum(us for cause, us in self.ledger.spent.items() if cause.part not in apart)

    @property
    def waited(self) -> float:
        """Exposed waits for other ranks."""
        return sum(us for cause, us in self.ledger.spent.items() if cause.part is LedgerPart.LATE)


class StepDifference(NamedTuple):
    """Measured minus expected, in microseconds, by cause; largest first."""

    measured: float
    expected: float
    causes: Sequence[tuple[str, float]]


def mean_step(rank: RecordedRank) -> MeanStep:
    """Return the mean of the steps of `rank`."""
    count = len(rank.steps)
    mean = StepLedger(defaultdict(float), defaultdict(float))
    for step in rank.steps:
        for target, source in zip(mean, ledger(rank, step), strict=True):
            for cause, us in source.items():
                target[cause] += us / count
    took = [step.end - step.start for step in rank.steps]
    middle = median(took)
    return MeanStep(mean, sum(took) / count, median(abs(each - middle) for each in took))


def critical(steps: Sequence[MeanStep]) -> MeanStep:
    """Return the step of the rank that waits least for others, so that they wait for it."""
    return min(steps, key=lambda step: step.waited)


def late_rank(waited: Mapping[int, float]) -> int | None:
    """Return the rank for which the others wait; None if it is now one, now another."""
    rank = max(waited, key=lambda each: waited[each], default=None)
    if rank is None or waited[rank] <= NAMED_SHARE * sum(waited.values()):
        return None
    return rank


def difference(
    steps: Sequence[MeanStep],
    waited: Mapping[int, float],
    expected: Sequence[MeanStep],
    *,
    by_class: bool,
) -> StepDifference:
    """Return why the steps of some ranks took longer than expected.

    What the median rank takes more is a cause that ranks share. What the critical rank takes more
    than the median one is a late rank. On the critical rank, exposed communication that grew as
    much with what is hidden is slower; the rest of it is overlap that was lost. Kernels are
    compared by class if `by_class`, else together.
    """
    least = critical(steps)
    common = sorted(steps, key=lambda step: step.own)[(len(steps) - 1) // 2]
    model = critical(expected)
    real, shared, plan = (
        _merged(each.ledger, by_class=by_class) for each in (least, common, model)
    )
    named = late_rank(waited)
    late = "late rank" if named is None else f"late rank: {named}"
    found: defaultdict[str, float] = defaultdict(float)
    for cause in real.spent.keys() | shared.spent.keys() | plan.spent.keys():
        change = real.spent[cause] - plan.spent[cause]
        if cause.part is LedgerPart.EXPOSED:
            grew = change + real.hidden[cause] - plan.hidden[cause]
            slower = max(0.0, min(grew, change)) if change > 0 else change
            found[f"slower {cause}"] += slower
            found["lost overlap"] += change - slower
        elif cause.part is LedgerPart.LATE:
            found["late ranks, now one, now another"] += change
        else:
            found[late] += real.spent[cause] - shared.spent[cause]
            found[str(cause)] += shared.spent[cause] - plan.spent[cause]
    ordered = sorted(found.items(), key=lambda each: (-abs(each[1]), each[0]))
    ordered = [(cause, us) for cause, us in ordered if abs(us) > 1e-9]
    rest = sum(us for _, us in ordered[MOST:])
    causes = (*ordered[:MOST], *([(OTHERS, rest)] if ordered[MOST:] else []))
    return StepDifference(least.took, model.took, causes)


def _merged(found: StepLedger, *, by_class: bool) -> StepLedger:
    """Return a ledger for comparisons: collectives without their groups.

    Two programs give the groups other names. Kernels become one cause unless `by_class`.
    """
    merged = StepLedger(defaultdict(float), defaultdict(float))
    for target, source in zip(merged, found, strict=True):
        for cause, us in source.items():
            what = "kernels" if cause.part is LedgerPart.COMPUTE and not by_class else cause.what
            target[TimeCause(cause.part, what)] += us
    return merged
