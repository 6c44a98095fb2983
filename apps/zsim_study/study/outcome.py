"""Outcome of a run of a study: results, or the reason why there are none. Stored as JSON."""

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from math import inf

from zsim.analysis.summary import Summary
from zsim.schedule.json import FieldError, decode_value, encode_value
from zsim.trace.trace import StepError


class Status(StrEnum):
    """Status of a run at its end."""

    DONE = "done"
    """The run fits in memory and has results."""
    FULL = "does not fit"
    """The run has results, computed as if the memory were sufficient."""
    IMPOSSIBLE = "impossible"
    """The fields of the scenario contradict each other."""
    NOT_MODELLED = "not modelled"
    """The simulation does not support the scenario."""
    CUT_OFF = "cut off"
    """The network has no route between some ranks."""
    NOT_PROVED = "not proved"
    """The check of the schedule has findings."""
    FAILED = "failed"
    """The run started and did not complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOutcome:
    """Outcome of a run; `reason` explains in one line any status other than DONE.

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
    """Return the outcome in `text`, a line written by `encoded`.

    Raises:
        FieldError: the text is not a valid outcome.
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
    """Raise FieldError unless the outcome has the results that its status needs.

    Raises:
        FieldError: results are missing, negative or infinite, or the step time is 0.
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
