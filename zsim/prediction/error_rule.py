"""The rule for the error of a prediction: a scale from features, times one quantile.

The error is the logarithm of the ratio of predicted to published value. Its scale is the
exponential of a sum over columns, from a ridge regression of the logarithm of absolute errors. A
score is an error divided by its scale. 90 % of scores are within `quantile`, with the weights of
hierarchical conformal prediction (Dunn, Wasserman, Ramdas 2023, "Distribution-Free Prediction Sets
for Two-Layer Hierarchical Models", arXiv 1809.07441). `zsim_lab.fit.error_fit` fits it; the
package has the fitted numbers in `error_rules.json`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from math import exp, log
from typing import Any

FILE = "error_rules.json"

LEVEL = 0.9
"""Fraction of comparable runs that an interval covers."""

SURE = 0.95
"""Minimum probability of fitting of the settings that answers rank first."""

COMPARABLE = f"{100 * LEVEL:.0f} % of comparable runs"


@dataclass(frozen=True, slots=True)
class ErrorInterval:
    """Bounds of a value as factors of its prediction: `low` is at most 1, `high` at least 1."""

    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the distance between the bounds, as a fraction of the prediction."""
        return (self.high - self.low) / 2

    def text(self) -> str:
        """Return the half-width in percent: "±17 %"."""
        return f"±{100 * self.half_width:.0f} %"

    def of(self, value: float) -> tuple[float, float]:
        """Return the bounds of a predicted value."""
        return value * self.low, value * self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRule:
    """A fitted rule.

    Attributes:
        base: logarithm of the scale if every column is 0.
        weights: weight of each column.
        quantile: bound of the fraction `LEVEL` of all scores.
        skew: errors above 0 are divided by it, errors below 0 multiplied: predictions may be wrong
            by more on one side.
        unseen: by prefix of its name, the weight of a column that the fit did not see.
    """

    base: float
    weights: Mapping[str, float]
    quantile: float
    skew: float = 1.0
    unseen: Mapping[str, float]

    def scale(self, columns: Mapping[str, float]) -> float:
        """Return the scale of errors of a run with these columns."""
        return exp(self.base + sum(self.weight(name) * of for name, of in columns.items()))

    def weight(self, name: str) -> float:
        """Return the weight of a column; 0 if it is unknown."""
        if name in self.weights:
            return self.weights[name]
        return next((of for prefix, of in self.unseen.items() if name.startswith(prefix)), 0.0)

    def interval(self, columns: Mapping[str, float]) -> ErrorInterval:
        """Return the interval of a value whose prediction has these columns."""
        most = self.quantile * self.scale(columns)
        return ErrorInterval(exp(-most * self.skew), exp(most / self.skew))

    def score(self, error: float, columns: Mapping[str, float]) -> float:
        """Return the score of an error."""
        sided = error / self.skew if error > 0 else -error * self.skew
        return sided / self.scale(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRule:
    """Probability that a run fits: logistic in the logarithm of usable over needed memory.

    Attributes:
        base: log odds if the needed memory equals the usable memory.
        slope: increase of the log odds per unit of that logarithm.
    """

    base: float
    slope: float

    def probability(self, needed_bytes: float, usable_bytes: float) -> float:
        """Return the probability that a run with `needed_bytes` of predicted memory fits."""
        if usable_bytes <= 0:
            return 0.0
        if needed_bytes <= 0:
            return 1.0
        odds = self.base + self.slope * log(usable_bytes / needed_bytes)
        return 1 / (1 + exp(-odds)) if odds > -700 else 0.0

    def room(self, probability: float) -> float:
        """Return the fraction of the usable memory that fits with this probability."""
        return exp((self.base - log(probability / (1 - probability))) / self.slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRules:
    """All rules that are fitted to the table of published runs.

    Attributes:
        time: errors of step times.
        ratio: errors of the ratio of two step times of one model, runtime and GPU.
        peak: errors of peaks of memory.
        fit: probability that a run fits.
    """

    time: ErrorRule
    ratio: ErrorRule
    peak: ErrorRule
    fit: FitRule

    def text(self) -> str:
        """Return the text of the packaged file."""
        return f"{json.dumps(asdict(self), indent=1)}\n"


@cache
def shipped_rules() -> ErrorRules:
    """Return the packaged rules."""
    return parsed_rules((files("zsim.prediction") / FILE).read_text("utf-8"))


def parsed_rules(text: str) -> ErrorRules:
    """Return the rules from the text that `ErrorRules.text` returned."""
    found: dict[str, Any] = json.loads(text)
    fit = FitRule(**found.pop("fit"))
    return ErrorRules(fit=fit, **{name: ErrorRule(**of) for name, of in found.items()})
