"""Measured coverage of error rules: each publication is judged by rules fitted to the others."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

from zsim.prediction.error_rule import LEVEL, ErrorInterval
from zsim_lab.fit.error_fit import ErrorFit, ErrorRow, FitRow, fitted_fit

MISSED = 2 / (1 - LEVEL)
"""Factor of the distance of an error from its interval in the interval score (Gneiting and
Raftery 2007, "Strictly Proper Scoring Rules, Prediction, and Estimation")."""

BINS = 10
"""Number of probability bins in the reliability table."""


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """A row, and its interval by the rules fitted to all other publications."""

    group: str
    error: float
    interval: ErrorInterval
    kind: str = ""

    @property
    def is_inside(self) -> bool:
        """True if the published value is within the interval."""
        low, high = self.bounds
        return low <= self.error <= high

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the logarithm of the ratio of predicted to published value."""
        return -log(self.interval.high), -log(self.interval.low)

    @property
    def score(self) -> float:
        """Interval score: the width, plus a penalty for an error outside the interval."""
        low, high = self.bounds
        return high - low + MISSED * (max(0.0, low - self.error) + max(0.0, self.error - high))


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCoverage:
    """Coverage of rows of one kind.

    Attributes:
        rows, groups: numbers of rows and of publications.
        inside, inside_groups: fraction of rows inside, and its mean over publications.
        score, score_groups: mean interval score of rows, and its mean over publications.
        half_width: median half-width of the intervals.
    """

    kind: str
    rows: int
    groups: int
    inside: float
    inside_groups: float
    score: float
    score_groups: float
    half_width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliability:
    """Runs with a probability of fitting in one bin, and the fraction of them that fit."""

    least: float
    most: float
    runs: int
    predicted: float
    ran: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Probabilities of fitting compared with outcomes; each sweep is held out of the fit.

    Attributes:
        runs, ran: number of runs, and of runs that fit.
        brier: mean squared difference of probability and outcome.
        always: the same for a constant probability, the fraction of runs that fit.
    """

    runs: int
    ran: int
    brier: float
    always: float
    reliability: tuple[Reliability, ...]


def left_out(fit: ErrorFit, rows: Sequence[ErrorRow], kinds: Sequence[str]) -> list[LeftOutRow]:
    """Return `rows` with the intervals of fits without their publication."""
    rules = {group: fit.rule(without=group) for group in fit.groups}
    return [
        LeftOutRow(row.group, row.error, rules[row.group].interval(row.columns), kind)
        for row, kind in zip(rows, kinds, strict=True)
    ]


def coverage(kind: str, rows: Sequence[LeftOutRow]) -> ErrorCoverage:
    """Return the coverage of `rows`."""
    of_group: defaultdict[str, list[LeftOutRow]] = defaultdict(list)
    for row in rows:
        of_group[row.group].append(row)
    return ErrorCoverage(
        kind=kind,
        rows=len(rows),
        groups=len(of_group),
        inside=fmean(row.is_inside for row in rows),
        inside_groups=fmean(fmean(row.is_inside for row in own) for own in of_group.values()),
        score=fmean(row.score for row in rows),
        score_groups=fmean(fmean(row.score for row in own) for own in of_group.values()),
        half_width=median(row.interval.half_width for row in rows),
    )


def by_kind(rows: Sequence[LeftOutRow]) -> list[ErrorCoverage]:
    """Return the coverage of rows of each kind, in the order of their names."""
    of_kind: defaultdict[str, list[LeftOutRow]] = defaultdict(list)
    for row in rows:
        of_kind[row.kind].append(row)
    return [coverage(kind, own) for kind, own in sorted(of_kind.items())]


def fit_report(rows: Sequence[FitRow]) -> FitReport:
    """Return the probabilities of fitting of `rows`, with each group held out of the fit."""
    found: list[tuple[float, bool]] = []
    for group in sorted({row.group for row in rows}):
        rule = fitted_fit([row for row in rows if row.group != group])
        found += [
            (rule.probability(row.needed_bytes, row.usable_bytes), row.ran)
            for row in rows
            if row.group == group
        ]
    share = fmean(ran for _, ran in found)
    return FitReport(
        runs=len(found),
        ran=sum(ran for _, ran in found),
        brier=fmean((chance - ran) ** 2 for chance, ran in found),
        always=fmean((share - ran) ** 2 for _, ran in found),
        reliability=tuple(_reliability(found)),
    )


def _reliability(found: Sequence[tuple[float, bool]]) -> Iterable[Reliability]:
    bins: defaultdict[int, list[tuple[float, bool]]] = defaultdict(list)
    for chance, ran in found:
        bins[min(int(chance * BINS), BINS - 1)].append((chance, ran))
    for at, own in sorted(bins.items()):
        yield Reliability(
            least=at / BINS,
            most=(at + 1) / BINS,
            runs=len(own),
            predicted=fmean(chance for chance, _ in own),
            ran=fmean(ran for _, ran in own),
        )
