"""Coverage of the percentile that trust prints: judged runs are left out, and judged by the others.

A run that is asked about is of no publication in the table, or of a sweep that the table does not
have. So each row is asked as if its publication, or its sweep, were not there.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, exp, lgamma, log
from statistics import median
from typing import NamedTuple

from zsim.prediction.evidence import JudgedRun
from zsim.prediction.likeness import (
    LEVEL,
    JudgedQuantity,
    alike,
    elsewhere,
    error_of,
    kind_of,
    kind_text,
)

MANY = 20
"""Rows from which a kind is tested by itself."""


class LeftOut(StrEnum):
    """What is left out of the table when a run is asked about."""

    SWEEP = "sweep"
    PUBLICATION = "publication"


GROUPS: dict[LeftOut, Callable[[JudgedRun], Hashable]] = {
    LeftOut.SWEEP: lambda run: (run.publication, run.sweep),
    LeftOut.PUBLICATION: lambda run: run.citation,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How often errors stay within the percentile that is printed, for runs of a kind.

    Attributes:
        rows: how many there are.
        stated: how many of them have a percentile.
        covered: how many of these have no larger error.
        printed: median of the percentiles; None if none is printed.
        observed: the percentile of the errors of those that have one.
    """

    kind: str
    rows: int
    stated: int
    covered: int
    printed: float | None
    observed: float | None

    @property
    def share(self) -> float | None:
        """Return the share that is covered."""
        return self.covered / self.stated if self.stated else None

    @property
    def p_value(self) -> float | None:
        """Return the chance of a share as far off, if each row were covered with `LEVEL`."""
        return binomial_p(self.covered, self.stated) if self.stated else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageTable:
    """Coverage of all runs, of those that do not stall, and of each kind.

    Runs that stall are told by what was published alone, and judge others like any run.
    """

    everything: Coverage
    steady: Coverage
    kinds: Sequence[Coverage]


def coverage(
    runs: Sequence[JudgedRun], left_out: LeftOut, quantity: JudgedQuantity
) -> CoverageTable:
    """Return the coverage of `runs`."""
    group = GROUPS[left_out]
    of_kind: defaultdict[Hashable, list[JudgedRun]] = defaultdict(list)
    for run in runs:
        if error_of(run, quantity) is not None:
            of_kind[kind_of(run.features, quantity)].append(run)
    rest = {
        left: [run for run in runs if group(run) != left] for left in {group(run) for run in runs}
    }
    asked: dict[str, list[_Asked]] = {}
    for found in of_kind.values():
        asked[kind_text(found[0].features, quantity)] = [
            _asked(
                run,
                [each for each in found if group(each) != group(run)],
                rest[group(run)],
                quantity,
            )
            for run in found
        ]
    everything = [each for found in asked.values() for each in found]
    return CoverageTable(
        everything=_coverage("all", everything),
        steady=_coverage("all that do not stall", [each for each in everything if not each.stalls]),
        kinds=[_coverage(name, each) for name, each in asked.items()],
    )


class _Asked(NamedTuple):
    """A run that was asked about: how far off its prediction is, and what was stated of it."""

    error: float
    bound: float | None
    stalls: bool


def _asked(
    run: JudgedRun,
    same_kind: Sequence[JudgedRun],
    others: Sequence[JudgedRun],
    quantity: JudgedQuantity,
) -> _Asked:
    """Return how far off the prediction of `run` is, and what is stated of it by `others`.

    No run that is not of the `same_kind` is alike.
    """
    error = error_of(run, quantity)
    assert error is not None
    bound = alike(run.features, same_kind, quantity).bound
    if bound is None:
        bound = elsewhere(run.features, others, quantity).bound
    return _Asked(abs(error), bound, run.stalls)


def _coverage(kind: str, asked: Sequence[_Asked]) -> Coverage:
    stated = [(each.error, each.bound) for each in asked if each.bound is not None]
    ordered = sorted(error for error, _ in stated)
    return Coverage(
        kind=kind,
        rows=len(asked),
        stated=len(stated),
        covered=sum(error <= bound for error, bound in stated),
        printed=median(bound for _, bound in stated) if stated else None,
        observed=ordered[ceil(LEVEL * len(ordered)) - 1] if ordered else None,
    )


def binomial_p(hits: int, trials: int, chance: float = LEVEL) -> float:
    """Return the two-sided exact p-value of so many hits: that of all outcomes no likelier."""
    # By logarithms: of more than a thousand trials the coefficients are beyond a float.
    likely = [
        exp(
            lgamma(trials + 1)
            - lgamma(each + 1)
            - lgamma(trials - each + 1)
            + each * log(chance)
            + (trials - each) * log(1 - chance)
        )
        for each in range(trials + 1)
    ]
    return min(1.0, sum(each for each in likely if each <= likely[hits] * (1 + 1e-9)))
