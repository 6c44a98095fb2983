"""Sensitivity of a step time to imbalance: the same run with a busier expert rank."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zsim.backend.backend import Backend, Job, UnsteadyError
from zsim.schedule.bind import bound
from zsim.schedule.binding import Balanced, Ratio

if TYPE_CHECKING:
    from zsim.api.pipeline_fold import MicroBatchFold

MORE = 0.1
"""Additional copies of tokens of the busiest rank, in multiples of the mean."""

OPERATIONS_MAX = 60_000
"""Maximum operations of a schedule that is simulated a second time, in about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Step time in seconds if the busiest rank receives `busiest` times the mean."""

    busiest: float
    step_time_s: float

    def text(self, step_time_s: float) -> str:
        """Return the difference to a run of `step_time_s`."""
        change = self.step_time_s / step_time_s - 1
        key = f"experts.busiest={self.busiest:.3g}"
        return f"{change:+.1%} if the busiest rank receives {self.busiest:.3g} x mean (--set {key})"


def imbalance_of(
    job: Job, simulation: Backend, fold: "MicroBatchFold | None" = None
) -> Imbalance | None:
    """Return the run with a busier rank; None for drawn or recorded counts, and long schedules.

    Also None if a step with `fold` has no period then.
    """
    named, binding = job.named, job.binding
    if named is None or not isinstance(binding, Balanced | Ratio):
        return None
    if sum(len(each.step) for each in job.schedule.programs) > OPERATIONS_MAX:
        return None
    from zsim.api.forecast import last_step_s

    least = binding.busiest if isinstance(binding, Ratio) else 1.0
    members = min(named.group_by_name[each.group].size(named.mesh) for each in named.counts)
    busiest = min(round(least + MORE, 6), float(members))
    found = bound(named, Ratio(busiest=busiest))
    if busiest <= least or found.excess is not None:
        return None
    seconds = last_step_s if fold is None else fold.last_step_s
    try:
        step_s = seconds(replace(job, schedule=found.schedule), simulation)
    except UnsteadyError:
        return None
    return Imbalance(busiest=busiest, step_time_s=step_s)
