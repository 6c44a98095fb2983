"""Fit of the rule for errors: ridge regression, quantile of scores, probability of fitting.

Publications are weighted. In the regression, a row of a publication with n rows has the weight
1 / sqrt(n). In the quantile of scores, each of G publications has the weight 1 / (G + 1), evenly
over its rows; the remaining weight is that of the predicted publication.
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
"""Factor of the squared weights of columns in the regression."""

LEAST = 0.01
"""Constant added to absolute errors before their logarithm: an error may be 0 by chance."""

FIT_RIDGE = 1e-3
"""Factor of the squared slope; without it the slope diverges if predictions separate all runs."""

ROUNDS = 60
"""Steps of Newton's method; it converges in about ten."""

DIGITS = 10
"""Significant digits of fitted numbers in the package; platforms differ beyond."""

Vector: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """A row that the rule is fitted to, or judged by.

    Attributes:
        group: the publication; rows of one publication are never in both the fit and the judgement.
        error: logarithm of the ratio of predicted to published value.
        columns: columns of the run, or of the two runs.
    """

    group: str
    error: float
    columns: Columns


@dataclass(frozen=True, slots=True)
class FitRow:
    """A run that fit or ran out of memory, and its predicted memory."""

    group: str
    needed_bytes: int
    usable_bytes: int
    ran: bool


class ErrorFit:
    """Fits of the rule to all rows, or to all rows except one publication.

    Attributes:
        groups: the publications.
    """

    def __init__(
        self, rows: Sequence[ErrorRow], *, is_symmetric: bool = False, widest: Sequence[str] = ()
    ) -> None:
        """Prepare fits to `rows`.

        Without `is_symmetric`, errors on one side may be larger. `widest` are prefixes of column
        names: an unseen column with such a prefix gets the largest weight of columns with the same
        prefix.
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
        """Return the rule fitted to all rows, or to those of all publications except `without`."""
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
        """Return the weights of a ridge regression on the rows of some groups."""
        penalty = RIDGE * np.eye(self._matrix.shape[1])
        penalty[0, 0] = 0.0  # the scale of errors is free, whatever the columns
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
    """Return the score that another group's scores are below with the probability `level`.

    With too few groups, return the largest score.
    """
    counts = Counter(groups)
    reached = 0.0
    for score, group in sorted(zip(scores, groups, strict=True), key=lambda each: each[0]):
        reached += 1 / ((len(counts) + 1) * counts[group])
        if reached >= level - 1e-12:
            return score
    return max(scores)


def _skew(scaled: Vector, counts: Vector) -> float:
    """Return the square root of the ratio of scales of the most likely two-sided exponential.

    These scales are proportional to the square roots of the mean scores above and below 0.
    """
    above = float((np.maximum(scaled, 0) / counts).sum())
    below = float((np.maximum(-scaled, 0) / counts).sum())
    return (above / below) ** 0.25 if above and below else 1.0


def fitted_fit(rows: Sequence[FitRow]) -> FitRule:
    """Fit the probability of fitting in memory as a logistic curve, by maximum likelihood."""
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
