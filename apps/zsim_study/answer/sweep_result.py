"""`zsim.sweep`: the runs of a study, ranked by its goal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zsim.api.answer import Answer, Progress, ignore_progress
from zsim.api.data_frame import data_frame
from zsim.api.figure_file import drawn_figure, need_figure
from zsim.api.notebook import Picture, table_html
from zsim.backend.backend import RunFailedError
from zsim.files.output_file import need_folder, unwritten, write
from zsim.limits import limits
from zsim.mistake import MistakeError, mistakes
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.workers.processes import cores
from zsim_study.answer.sweep_text import sweep_text
from zsim_study.study.file import StudyError
from zsim_study.study.outcome import StudyOutcome
from zsim_study.study.result import StudyResult, result_of
from zsim_study.workers.code_version import code_version
from zsim_study.workers.store import Store, opened
from zsim_study.workers.study_columns import columns, csv_text
from zsim_study.workers.study_source import Study, study_of
from zsim_study.workers.work import keys_of, left_of, work_off
from zsim_study.workers.worker import FinishedRun, RunBatch, simulated
from zsim_study.workers.worker_pool import worker_pool

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["SweepResult", "figures_of", "study_of", "sweep"]

IN_MEMORY = Path(":memory:")
"""SQLite's name of a temporary store in memory."""


def figures_of(study: Study) -> tuple[str, ...]:
    """Return the names of the figures of `study` that `SweepResult.picture` can draw."""
    from zsim_study.page.chart import study_figures

    return study_figures([axis.name for axis in study.plan.axes])


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SweepResult(Answer):
    """Result of a study.

    Attributes:
        study: all runs with their outcomes, and the ranking.
        store: the file of stored outcomes; None without a store.
        not_kept: number of outcomes that did not fit into the store; only this result has them.
        why_not_kept: error message of SQLite about them; empty if all are stored.
    """

    study: StudyResult
    store: Path | None = None
    not_kept: int = 0
    why_not_kept: str = ""

    @property
    def question(self) -> str:
        """The question that the study asks."""
        return self.study.question

    @property
    def answer(self) -> str:
        """The best run in one sentence, or that there is none."""
        return self.study.answer

    @property
    def best(self) -> str | None:
        """Name of the best run; None if no run meets the goal."""
        accepted = self.study.ranking.accepted
        return accepted[0].name if accepted else None

    def rows(self) -> list[dict[str, object]]:
        """Return every run, in the order of the study: axes, status, figures, cost.

        Names end in units; a missing figure is None.
        """
        return [{"name": row.name, **columns(self.study, row)} for row in self.study.rows]

    def text(self) -> str:
        """Return the answer, a table of runs, and notes on it."""
        return sweep_text(self.study, self.store)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim sweep --json` prints."""
        return {
            "question": self.question,
            "answer": self.answer,
            "best": self.best,
            "goal": self.study.goal.minimize,
            "held_fixed": self.study.held,
            "dropped_combinations": self.study.dropped,
            "error": self.study.error,
            "runs": self.rows(),
        }

    def to_pandas(self) -> "DataFrame":
        """Return `rows()` as a pandas DataFrame.

        Raises:
            MistakeError: pandas is not installed.
        """
        return data_frame(self.rows())

    def need_kept(self) -> None:
        """Raise UnwrittenError unless all outcomes are in the store, or there is no store.

        Raises:
            UnwrittenError: the store had no space for some outcomes; only this result has them.
        """
        if self.store is not None and self.why_not_kept:
            count = len(self.study.rows)
            left = f"{self.not_kept:,} of {count:,} runs are not in it; the same command goes on"
            raise unwritten(self.store, f"{self.why_not_kept}; {left}")

    def csv(self, path: str | PathLike[str]) -> None:
        """Write all runs to `path` as CSV.

        Raises:
            MistakeError: the folder does not exist.
            UnwrittenError: the file cannot be written.
        """
        need_folder("csv", Path(path))
        write(Path(path), csv_text(self.study))

    def report(self, path: str | PathLike[str]) -> None:
        """Write an HTML page about the study to `path` (.html).

        Raises:
            MistakeError: `path` is not .html, or the extra `report` is not installed.
            UnwrittenError: the file cannot be written.
        """
        from zsim.files.html_page import need_html, render
        from zsim_study.page.study_page import study_page

        need_html("report", Path(path))
        write(Path(path), render(study_page(self.study), made=datetime.now(UTC).date()))

    def picture(
        self, path: str | PathLike[str] | None = None, *, figure: str | None = None
    ) -> Picture:
        """Draw the runs; write the picture to `path` (.svg, .png or .pdf) if given.

        Args:
            path: path of the file; None to write none.
            figure: name of the axis to draw along, or "changes": the effect of single changes on
                the best run. None selects the axis with the most choices.

        Raises:
            MistakeError: `figure` is unknown, or PNG and PDF need the extra `draw`.
            UnwrittenError: the file cannot be written.
        """
        from zsim_study.page.chart import chart, study_figures

        if figure is not None:
            need_figure("figure", figure, study_figures(self.study.axes))
        return drawn_figure("picture", path, lambda: chart(self.study, figure))

    def __repr__(self) -> str:
        return f"SweepResult(question={self.question!r}, answer={self.answer!r})"

    def _repr_html_(self) -> str:
        return table_html(f"{self.question} {self.answer}", self.rows())


def sweep(
    study: str | PathLike[str] | Mapping[str, Any] | Study,
    *,
    store: str | PathLike[str] | None = None,
    workers: int | None = 1,
    scheduler: str | None = None,
    progress: Progress | None = None,
    tell: Callable[[str], object] = str,
) -> SweepResult:
    """Run a study: simulate all its runs and rank them by its goal.

    Args:
        study: name of a packaged study, a TOML file, or its tables.
        store: SQLite file of outcomes; runs in it are not repeated. If its disk becomes full,
            the sweep continues, and the result has the number of outcomes not stored.
        workers: number of processes, None for one per core; if more than 1, each process
            imports the calling program.
        scheduler: address of a Dask cluster to run on instead.
        progress: callback that receives the number of runs done, and of all runs.
        tell: callback that receives a line about each recovered problem: lost workers that
            were replaced, and damaged rows of the store.

    Raises:
        MistakeError: the study, the store or the scheduler cannot be used.
        RunFailedError: no worker can start (finished runs are in the store), or the store
            cannot be created.
    """
    workers = cores() if workers is None else workers
    if workers < 1:
        raise MistakeError(f"workers: {workers} must be at least 1")
    asked = study_of(study)
    path = IN_MEMORY if store is None else Path(store)
    with opened(path) as kept:
        runs = asked.plan.runs
        sweeping = _Sweeping(
            keys=keys_of(runs, code_version()),
            store=kept,
            path=path,
            workers=workers,
            scheduler=scheduler,
            progress=progress or ignore_progress,
            tell=tell,
        )
        for line in kept.damage:
            tell(line)
        known = kept.get(tuple(dict.fromkeys(sweeping.keys.values())))
        if kept.disbelieved:
            tell(f"{path}: {kept.disbelieved} rows are not what was written; they run again")
        sweeping.work(left_of(runs, sweeping.keys, known), known)
        outcomes = {name: known[key] for name, key in sweeping.keys.items()}
    with mistakes(StudyError, prefix=f"{asked.given}: "):
        return SweepResult(
            study=result_of(asked.plan, outcomes),
            store=None if store is None else path,
            not_kept=kept.not_written,
            why_not_kept=kept.why_not,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sweeping:
    """State and options of a running sweep: its store and its workers."""

    keys: Mapping[str, str]
    store: Store
    path: Path
    workers: int
    scheduler: str | None
    progress: Progress
    tell: Callable[[str], object]

    def work(self, left: Mapping[str, ResolvedScenario], known: dict[str, StudyOutcome]) -> None:
        """Run the remaining runs; put outcomes into the store and into `known`."""
        if not left:
            return
        try:
            self._work(left, known)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._kept(known)) from None
        except RunFailedError as error:
            raise RunFailedError(f"{error}; {self._kept(known)}") from error

    def _work(self, left: Mapping[str, ResolvedScenario], known: dict[str, StudyOutcome]) -> None:
        names = {key: name for name, key in self.keys.items()}
        self.progress(len(names) - len(left), len(names))
        with worker_pool(min(self.workers, len(left)), self.scheduler) as found:

            def keep(done: Sequence[tuple[str, FinishedRun]]) -> None:
                self.store.put(
                    (key, names[key], each.outcome, each.seconds) for key, each in done if each.keep
                )
                known.update({key: each.outcome for key, each in done})
                self.progress(len(names.keys() & known.keys()), len(names))

            mine = limits()  # remote workers use their own memory limit
            how = RunBatch((), simulated, limits=mine)
            if found.remote:
                there = replace(mine, memory_bytes=None)
                how = RunBatch((), simulated, code_version(), there)
            work_off(left, found, how, keep, tell=self.tell)
        self.store.put()  # retry rows that a full disk refused before

    def _kept(self, known: Mapping[str, StudyOutcome]) -> str:
        """Return the number of stored runs, and the command that continues the study."""
        keys, lost = set(self.keys.values()), self.store.not_written
        done = f"{len(keys & known.keys()) - lost:,} of {len(keys):,} runs"
        if self.path == IN_MEMORY:
            return f"{done} were done, and are lost without a store"
        more = f", {lost:,} more could not be written ({self.store.why_not})" if lost else ""
        return f"{done} are in {self.path}{more}; the same command goes on"
