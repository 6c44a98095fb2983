"""Claims of papers: sentences with a number, compared with figures that zsim predicts.

A claim names predicted rows of figures in an expression (`zsim_lab.rows.expression`):

    row("figure 2", "100B") * 400 / 1000

Names are `row(figure, label)`, `rows(figure)`, `mean`, `min` and `max`. A claim that no run can
predict has the reason instead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean

from pydantic import BaseModel, ConfigDict, model_validator

from zsim_lab.rows.csv_rows import NotModelledError
from zsim_lab.rows.expression import ExpressionError, evaluated
from zsim_lab.verdict.verdict import Verdict

NEAR = 0.15
"""Relative error up to which a figure holds."""


class Relation(StrEnum):
    """Relation between the predicted and the published value of a claim that holds."""

    ABOUT = "about"
    """At most `NEAR` apart, and on the same side of 1 if the claim is a ratio."""
    AT_LEAST = "at least"
    AT_MOST = "at most"
    RISES = "rises"
    """The predicted values increase strictly in their order."""
    FALLS = "falls"
    """The predicted values decrease strictly in their order."""


SIGNS: Mapping[Relation, str] = {Relation.AT_LEAST: "≥ ", Relation.AT_MOST: "≤ "}


class Claim(BaseModel):
    """A sentence of a paper with a number or a trend.

    Attributes:
        sentence: the claim in short words.
        source: section, figure or table.
        published: the printed number; None for a trend.
        unit: unit of the number; "times" for a ratio.
        predicted: expression of the predicted value, or of the values of a trend.
        not_predicted: the reason why no run predicts the claim.
        reason: known cause of a difference, printed with the verdict.
        executed: name of the small run on real ranks that has the mechanism of the claim.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sentence: str
    source: str
    relation: Relation = Relation.ABOUT
    published: float | None = None
    unit: str = ""
    predicted: str = ""
    not_predicted: str = ""
    reason: str = ""
    executed: str = ""

    @property
    def is_trend(self) -> bool:
        """True if the claim is an order of values."""
        return self.relation in {Relation.RISES, Relation.FALLS}

    @model_validator(mode="after")
    def _need_either(self) -> "Claim":
        if bool(self.predicted) == bool(self.not_predicted):
            raise ValueError(f"{self.sentence}: needs one of predicted and not_predicted")
        if (self.published is None) != self.is_trend and not self.not_predicted:
            raise ValueError(f"{self.sentence}: published is for claims that are no trend")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimVerdict:
    """A claim with its prediction.

    Attributes:
        values: the predicted value, or all values of a trend; empty without a prediction.
        why_not: the reason if there is no prediction.
    """

    claim: Claim
    values: tuple[float, ...] = ()
    why_not: str = ""

    @property
    def holds(self) -> bool | None:
        """True if the prediction agrees with the claim; None without a prediction."""
        if not self.values:
            return None
        match self.claim.relation:
            case Relation.RISES:
                return all(low < high for low, high in pairwise(self.values))
            case Relation.FALLS:
                return all(low > high for low, high in pairwise(self.values))
            case Relation.AT_LEAST:
                return self.values[0] >= self._published
            case Relation.AT_MOST:
                return self.values[0] <= self._published
            case Relation.ABOUT:
                return self.is_near and self._same_sign

    @property
    def off(self) -> float | None:
        """Relative error; None for a trend, or without a prediction."""
        if self.claim.is_trend or not self.values:
            return None
        return self.values[0] / self._published - 1

    @property
    def is_near(self) -> bool:
        """True if the relative error is at most `NEAR`."""
        return self.off is not None and abs(self.off) <= NEAR

    @property
    def published_text(self) -> str:
        """Published number with its bound and unit, or direction of a trend; empty without both."""
        claim = self.claim
        if claim.published is None:
            return claim.relation.value if claim.is_trend else ""
        return f"{SIGNS.get(claim.relation, '')}{claim.published:g} {claim.unit}"

    @property
    def predicted_text(self) -> str:
        """Predicted values; empty without a prediction."""
        return ", ".join(f"{value:.3g}" for value in self.values)

    @property
    def off_text(self) -> str:
        """Relative error in percent; empty without one."""
        return "" if self.off is None else f"{round(self.off * 100):+} %"

    @property
    def verdict_text(self) -> str:
        """Whether the claim holds."""
        return {True: "holds", False: "does not hold", None: "not predicted"}[self.holds]

    @property
    def reason(self) -> str:
        """Reason why there is no prediction, or known cause of a difference."""
        return self.why_not or self.claim.reason

    @property
    def _published(self) -> float:
        assert self.claim.published is not None, "only a trend has no number"
        return self.claim.published

    @property
    def _same_sign(self) -> bool:
        if self.claim.unit != "times" or self._published == 1:
            return True
        return (self.values[0] > 1) == (self._published > 1)


def claim_verdicts(claims: Iterable[Claim], figures: Iterable[Verdict]) -> list[ClaimVerdict]:
    """Evaluate claims on the predicted rows of `figures`."""
    names = _names({figure.name: figure for figure in figures})
    return [_verdict(claim, names) for claim in claims]


def _verdict(claim: Claim, names: Mapping[str, object]) -> ClaimVerdict:
    if claim.not_predicted:
        return ClaimVerdict(claim=claim, why_not=claim.not_predicted)
    try:
        found = evaluated(claim.predicted, names)
    except (NotModelledError, ExpressionError, ZeroDivisionError) as error:
        return ClaimVerdict(claim=claim, why_not=str(error))
    every = found if isinstance(found, tuple) else (found,)
    return ClaimVerdict(claim=claim, values=tuple(float(value) for value in every))


def _names(figures: Mapping[str, Verdict]) -> Mapping[str, Callable[..., object]]:
    """Return the functions of expressions over `figures`."""

    def row(figure: str, label: str) -> float:
        return _predicted(_figure(figures, figure), label)

    def rows(figure: str) -> tuple[float, ...]:
        return tuple(_figure(figures, figure).predicted.values())

    return {"row": row, "rows": rows, "mean": _mean, "min": min, "max": max}


def _mean(*values: float | Sequence[float]) -> float:
    """Return the mean of the arguments, or of one sequence."""
    return fmean(
        each for value in values for each in (value if isinstance(value, tuple) else (value,))
    )


def _figure(figures: Mapping[str, Verdict], name: str) -> Verdict:
    if name not in figures:
        raise ExpressionError(f"{name}: no figure has this name")
    return figures[name]


def _predicted(figure: Verdict, label: str) -> float:
    """Return the predicted value of a row.

    Raises:
        NotModelledError: the row has no prediction.
        ExpressionError: there is no such row.
    """
    if label in figure.predicted:
        return figure.predicted[label]
    for place, why in figure.unmodelled:
        if place == label:
            raise NotModelledError(f"{figure.name}, {label}: {why}")
    raise ExpressionError(f"{figure.name}: no row is named {label}")
