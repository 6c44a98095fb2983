"""Outcome of a run of a study: figures, or the reason why there are none. Kept as JSON."""

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from math import inf

from zsim.analysis.summary import Summary
from zsim.schedule.json import FieldError, decode_value, encode_value
from zsim.trace.trace import StepError


class Status(StrEnum):
    """End of a run."""

    DONE = "done"
    """It fits, and there are figures."""
    FULL = "does not fit"
    """There are figures, as if there were memory enough."""
    IMPOSSIBLE = "impossible"
    """The fields of the scenario contradict each other."""
    NOT_MODELLED = "not modelled"
    """The simulation refuses it."""
    CUT_OFF = "cut off"
    """Ranks have no way to each other."""
    NOT_PROVED = "not proved"
    """The check of its schedule has findings."""
    FAILED = "failed"
    """It began and could not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """Outcome of a run; `reason` says why, in one line, unless it is done.

    `error` is the error of the step time; None if it is unknown. `error_text` says it in one line.
    """

    status: Status
    reason: str = ""
    summary: Summary | None = None
    error_text: str = ""
    error: StepError | None = None


def encoded(outcome: StudyOutcome) -> str:
    """Return `outcome` as one line of JSON."""
    return json.dumps(encode_value(outcome, StudyOutcome), separators=(",", ":"), allow_nan=False)


def decoded(text: str) -> StudyOutcome:
    """Return the outcome that `encoded` made `text` from.

    Raises:
        FieldError: it is none.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise FieldError(str(error)) from None
    outcome = decode_value(found, StudyOutcome)
    assert isinstance(outcome, StudyOutcome)
    _need_ranges(outcome)
    return outcome


def _need_ranges(outcome: StudyOutcome) -> None:
    """Check that figures are there where they must be, and none is negative or infinite.

    Raises:
        FieldError: one is not.
    """
    if outcome.status in {Status.DONE, Status.FULL} and outcome.summary is None:
        raise FieldError("summary: missing of a run that is done")
    if outcome.summary is None:
        return
    for each in fields(outcome.summary):
        value = getattr(outcome.summary, each.name)
        if isinstance(value, int | float) and not 0 <= value < inf:
            raise FieldError(f"summary.{each.name}: {value} must be at least 0, and finite")
    if not outcome.summary.step_time_s:
        raise FieldError("summary.step_time_s: 0.0 must be more than 0")
