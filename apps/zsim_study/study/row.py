"""A run of a study with its outcome, as a row of tables and charts."""

from collections.abc import Mapping
from dataclasses import dataclass

from zsim_study.study.outcome import StudyOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRow:
    """One run and its outcome; a failed run is a row with a reason.

    Attributes:
        name: such as `stage=3, NICs=8`.
        labels: its choice on each axis.
        values: values that the axes set, by field of the scenario.
        gpus: number of ranks; 0 if the scenario is impossible.
        micro_batch_size, accumulation_steps: per replica; 0 if the scenario is impossible.
        outcome: results, or the reason why there are none.
        cost_per_million_tokens: cost at the price of the goal; None without a price.
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
        """Step time in seconds; infinite for a run without results, so that it never wins."""
        found = self.outcome.summary
        return float("inf") if found is None else found.step_time_s

    @property
    def band_s(self) -> tuple[float, float] | None:
        """Lower and upper bound of the step time in seconds; None if its error is unknown."""
        error = self.outcome.error
        if error is None or self.outcome.summary is None:
            return None
        return self.step_time_s * error.low, self.step_time_s * error.high
