"""A family of the proof: an invariant, its check, and the words of a proof without findings."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.schedule import Schedule


class Stage(StrEnum):
    """When a family is checked."""

    ORDER = "order"
    """First: a run in the order of issue relies on it."""
    VALUES = "values"
    """If the order is proved, and values are asked for."""
    PROMISES = "promises"
    """Always, and last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """An invariant of schedules.

    Attributes:
        name: name of the family in findings.
        stage: when it is checked.
        examine: returns the findings of a schedule.
        proves: returns the words about a schedule without findings, or None if it has nothing to
            which the family applies.
    """

    name: str
    stage: Stage
    examine: Callable[[Context], list[Finding]]
    proves: Callable[[Schedule], str | None]
