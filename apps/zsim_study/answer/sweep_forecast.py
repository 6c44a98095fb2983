"""Forecast of a study: the number of its runs, and about how long they take."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import perf_counter  # noqa: TID251  (the duration of a run is part of the answer)
from typing import Any

from zsim.api.answer import AnswerInFacts
from zsim.files.input_file import is_there
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.units import format_seconds
from zsim.workers.processes import cores
from zsim_study.study.outcome import StudyOutcome
from zsim_study.study.study_plan import StudyPlan
from zsim_study.workers.code_version import code_version
from zsim_study.workers.store import opened
from zsim_study.workers.study_source import Study, study_of
from zsim_study.workers.work import keys_of, left_of
from zsim_study.workers.worker import simulated
from zsim_study.workers.worker_pool import worker_pool


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepForecast(AnswerInFacts):
    """Work of a study.

    Attributes:
        title: the question of the study.
        plan: all runs.
        left: number of runs that are not in the store.
        schedules: number of different schedules of these runs.
        impossible: number of runs whose settings contradict each other.
        workers: number of processes, or of workers of the cluster.
        estimated_s: estimated seconds of the remaining runs, from timing one of them.
    """

    title: str
    plan: StudyPlan
    left: int
    schedules: int
    impossible: int
    workers: int
    estimated_s: float

    def facts(self) -> list[tuple[str, str]]:
        """Return the number of runs, their estimated time, and the settings that all runs share."""
        runs, combinations = self._counts
        dropped = f", of {combinations:,} combinations" if combinations > runs else ""
        impossible = f", {self.impossible:,} of them impossible" if self.impossible else ""
        schedules = f"{self.schedules:,} schedule{'s' if self.schedules != 1 else ''}"
        on = f"{self.workers} core{'s' if self.workers > 1 else ''}"
        taken = f"{format_seconds(self.estimated_s)} on {on}" if self.left else "0 s"
        left = f"{self.left:,} are left, with {schedules}"
        return [
            ("runs", f"{runs:,}{dropped}{impossible}; {left}"),
            ("takes about", taken),
            ("held fixed", self.plan.held),
        ]

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim sweep --dry-run --json` prints."""
        runs, combinations = self._counts
        return {
            "question": self.title,
            "combinations": combinations,
            "runs": runs,
            "impossible": self.impossible,
            "left": self.left,
            "schedules": self.schedules,
            "estimated_s": self.estimated_s,
            "workers": self.workers,
            "held_fixed": self.plan.held,
        }

    @property
    def _counts(self) -> tuple[int, int]:
        """Number of runs, and of combinations before some were dropped."""
        runs = len(self.plan.runs)
        return runs, runs + self.plan.dropped


def forecast_sweep(
    study: str | PathLike[str] | Mapping[str, Any] | Study,
    *,
    store: str | PathLike[str] | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
) -> SweepForecast:
    """Estimate the work of `zsim.sweep` with the same arguments by timing one run here.

    Raises:
        MistakeError: the study, the store or the scheduler cannot be used.
    """
    plan = study_of(study).plan
    keys, known = keys_of(plan.runs, code_version()), dict[str, StudyOutcome]()
    if store is not None and is_there(Path(store)):
        with opened(Path(store)) as kept:
            known = kept.get(tuple(keys.values()))
    settled = list(left_of(plan.runs, keys, known).values())
    workers = workers or cores()
    if scheduler is not None:
        with worker_pool(workers, scheduler) as there:
            workers = there.workers
    recipes = {resolved.schedule_key for resolved in settled}
    estimated_s = 0.0
    if settled:
        first_s, again_s = _timed(settled[len(settled) // 2])
        total_s = len(recipes) * first_s + (len(settled) - len(recipes)) * again_s
        estimated_s = total_s / min(workers, len(settled))
    return SweepForecast(
        title=plan.question,
        plan=plan,
        left=len(settled),
        schedules=len(recipes),
        impossible=sum(run.resolved is None for run in plan.runs),
        workers=workers,
        estimated_s=estimated_s,
    )


def _timed(resolved: ResolvedScenario) -> tuple[float, float]:
    """Return the seconds of a run with its schedule, and of one that reuses the schedule."""
    begin = perf_counter()
    made = simulated(resolved)
    if isinstance(made, StudyOutcome):
        return perf_counter() - begin, 0.0
    made.tried(resolved)
    between = perf_counter()
    made.tried(resolved)
    return between - begin, perf_counter() - between
