"""A run of a study with what came out of it: what tables and charts are made from."""

from collections.abc import Mapping
from dataclasses import dataclass

from zsim.study.outcome import StudyOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One run and its outcome; one that failed is a row with its reason.

    Attributes:
        name: `stage=3, NICs=8`.
        labels: its choice on each axis.
        values: what the axes set, by field of the scenario.
        gpus: ranks; 0 where the scenario cannot be.
        micro_batch_size, accumulation_steps: per replica; 0 where the scenario cannot be.
        outcome: figures, or the reason why there are none.
        cost_per_million_tokens: at the price of the goal, if it has one.
    """

    name: str
    labels: tuple[str, ...]
    values: Mapping[str, object]
    gpus: int
    micro_batch_size: int
    accumulation_steps: int
    outcome: StudyOutcome
    cost_per_million_tokens: float | None = None

    @property
    def step_time_s(self) -> float:
        """Of a step; infinite where there is none, so that it is never the least."""
        found = self.outcome.summary
        return float("inf") if found is None else found.step_time_s

    @property
    def band_s(self) -> tuple[float, float] | None:
        """The bounds of the step time; None if its error is unknown."""
        error = self.outcome.error
        if error is None or self.outcome.summary is None:
            return None
        return self.step_time_s * error.low, self.step_time_s * error.high
