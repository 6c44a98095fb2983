"""Fit of the rule for errors: ridge regression, quantile of scores, probability of fitting.

Each publication counts: in the regression a row of a publication with n rows has the weight
1 / sqrt(n); in the quantile of scores, of G publications each has the share 1 / (G + 1) of the
weight, evenly over its rows, and the rest is the publication that is asked about.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from zsim.prediction.error_columns import Columns
from zsim.prediction.error_rule import LEVEL, ErrorRule, FitRule

RIDGE = 3.0
"""Weight of the squared weights of columns."""

LEAST = 0.01
"""Added to absolute errors before their logarithm: a prediction may be right by chance."""

FIT_RIDGE = 1e-3
"""Weight of the squared slope: without one it has no end where predictions separate all runs."""

ROUNDS = 60
"""Steps of Newton's method; it converges in about ten."""

DIGITS = 10
"""Digits of fitted numbers that ship; platforms differ beyond."""

Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A row that the rule is fitted to, or judged by.

    Attributes:
        group: the publication; rows of one are never fitted and judged by.
        error: logarithm of the predicted over the published value.
        columns: of the run, or of the two.
    """

    group: str
    error: float
    columns: Columns


@dataclass(frozen=True, slots=True)
class FitRow:
    """A run that fitted or ran out of memory, with what it was predicted to need."""

    group: str
    needed_bytes: int
    usable_bytes: int
    ran: bool


class ErrorFit:
    """Fits of the rule to rows, all of them or without a publication.

    Attributes:
        groups: the publications.
    """

    def __init__(
        self, rows: Sequence[ErrorRow], *, is_symmetric: bool = False, widest: Sequence[str] = ()
    ) -> None:
        """Prepare fits to `rows`.

        Without `is_symmetric` errors on one side may be larger. A column whose name begins as
        `widest` says and that no row has counts as the widest of those that begin so.
        """
        self.groups = sorted({row.group for row in rows})
        self._names = sorted({name for row in rows for name in row.columns})
        self._widest, self._is_symmetric = tuple(widest), is_symmetric
        place = {name: at for at, name in enumerate(self.groups)}
        self._group: NDArray[np.int64] = np.array([place[row.group] for row in rows])
        self._errors = np.array([row.error for row in rows])
        self._counts = np.bincount(self._group).astype(float)
        self._matrix = np.zeros((len(rows), len(self._names) + 1))
        self._matrix[:, 0] = 1.0
        column = {name: at for at, name in enumerate(self._names, start=1)}
        for at, row in enumerate(rows):
            for name, value in row.columns.items():
                self._matrix[at, column[name]] = value
        logs = np.log(np.abs(self._errors) + LEAST)
        own = [np.flatnonzero(self._group == at) for at in range(len(self.groups))]
        self._seen: NDArray[np.bool_] = np.array(
            [(self._matrix[each] != 0).any(axis=0) for each in own]
        )
        shares = 1 / np.sqrt(self._counts)
        pairs = [
            (share * self._matrix[each].T @ self._matrix[each], self._matrix[each].T @ logs[each])
            for each, share in zip(own, shares, strict=True)
        ]
        self._squares = np.array([square for square, _ in pairs])
        self._products = np.array(
            [share * product for share, (_, product) in zip(shares, pairs, strict=True)]
        )

    def rule(self, *, without: str | None = None) -> ErrorRule:
        """Return the rule that is fitted to all rows, or to those of all other publications."""
        fitted = [at for at, name in enumerate(self.groups) if name != without]
        weights = self._weights(fitted)
        rows = np.isin(self._group, fitted)
        group, errors = self._group[rows], self._errors[rows]
        scaled = errors / np.exp(self._matrix[rows] @ weights)
        skew = 1.0 if self._is_symmetric else _skew(scaled, self._counts[group])
        scores = np.where(scaled > 0, scaled / skew, -scaled * skew)
        by_name = self._by_name(weights, fitted)
        return ErrorRule(
            base=_rounded(float(weights[0])),
            weights=by_name,
            quantile=_rounded(quantile_of(scores.tolist(), group.tolist())),
            skew=_rounded(skew),
            unseen={
                prefix: max((of for name, of in by_name.items() if name.startswith(prefix)))
                for prefix in self._widest
                if any(name.startswith(prefix) for name in by_name)
            },
        )

    def _weights(self, fitted: Sequence[int]) -> Vector:
        """Return the weights of a ridge regression to the rows of some groups."""
        penalty = RIDGE * np.eye(self._matrix.shape[1])
        penalty[0, 0] = 0.0  # errors have some scale, whatever the columns
        squares = self._squares[list(fitted)].sum(axis=0)
        found: Vector = np.linalg.solve(squares + penalty, self._products[list(fitted)].sum(axis=0))
        return found

    def _by_name(self, weights: Vector, fitted: Sequence[int]) -> dict[str, float]:
        seen: NDArray[np.bool_] = np.logical_or.reduce(self._seen[list(fitted)])
        return {
            name: _rounded(float(weights[at]))
            for at, name in enumerate(self._names, start=1)
            if seen[at]
        }


def quantile_of(scores: Sequence[float], groups: Sequence[object], level: float = LEVEL) -> float:
    """Return the score that one more group's are within with the chance `level`.

    The largest where there are too few groups.
    """
    counts = Counter(groups)
    reached = 0.0
    for score, group in sorted(zip(scores, groups, strict=True), key=lambda each: each[0]):
        reached += 1 / ((len(counts) + 1) * counts[group])
        if reached >= level - 1e-12:
            return score
    return max(scores)


def _skew(scaled: Vector, counts: Vector) -> float:
    """Return the factor between the two sides of the most likely two-sided exponential.

    Its scales are as the square roots of the means of scores above and below.
    """
    above = float((np.maximum(scaled, 0) / counts).sum())
    below = float((np.maximum(-scaled, 0) / counts).sum())
    return (above / below) ** 0.25 if above and below else 1.0


def fitted_fit(rows: Sequence[FitRow]) -> FitRule:
    """Return the probability of fitting by the most likely logistic curve."""
    outcomes = np.array([float(row.ran) for row in rows])
    spare = [log(row.usable_bytes / row.needed_bytes) for row in rows]
    matrix = np.column_stack([np.ones(len(rows)), np.array(spare)])
    found = np.zeros(2)
    penalty = np.diag([0.0, FIT_RIDGE])
    for _ in range(ROUNDS):
        chances = 1 / (1 + np.exp(-np.clip(matrix @ found, -500, 500)))
        slope = matrix.T @ (chances - outcomes) + penalty @ found
        curved = (matrix * (chances * (1 - chances))[:, None]).T @ matrix + penalty
        found = found - np.linalg.solve(curved + 1e-9 * np.eye(2), slope)
    return FitRule(base=_rounded(float(found[0])), slope=_rounded(float(found[1])))


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
