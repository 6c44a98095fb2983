"""Measured coverage of error intervals; a new table of published runs and its fitted rules."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer, Progress, ignore_progress
from zsim.api.answer_text import table_text
from zsim.api.forecast import Asked, forecasts
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.files.output_file import write
from zsim.mistake import MistakeError
from zsim.prediction import evidence
from zsim.prediction.error_rule import FILE, LEVEL, ErrorRules
from zsim.prediction.evidence import JudgedRun, MemoryOutcome, judged_runs, memory_outcomes
from zsim.prediction.run_features import RunFeatures
from zsim_lab.answer.judged_figures import figure_runs, judged_figures, scenario_features
from zsim_lab.answer.resumed_forecasts import resumed
from zsim_lab.fit.error_coverage import (
    ErrorCoverage,
    FitReport,
    LeftOutRow,
    by_kind,
    coverage,
    fit_report,
    left_out,
)
from zsim_lab.fit.error_fit import ErrorFit
from zsim_lab.fit.error_rows import (
    fit_rows,
    peak_rows,
    ratio_fit,
    ratio_rows,
    rules_of,
    scored,
    time_fit,
    time_rows,
)
from zsim_lab.rows.measurements import published_runs
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.judged_rows import different, judged_row, judges, memory_outcomes_of
from zsim_lab.verdict.training_verdict import question_of

COLUMNS = ("kind", "rows", "publications", "inside", "of publications", "score", "", "half-width")
KNOWN = "known runtime"
"""Kind of runs whose runtime is in several publications."""
CHANGED = {0: "another key", 1: "one choice", 2: "two choices", 3: "three choices"}
LEGEND = (
    "inside: share of rows within the interval, and its mean over publications; score: mean",
    "interval score of the logarithm of the error, of rows and over publications (less is better);",
    "half-width: median of half of the interval, as a share of the prediction; known runtime: one",
    "that another publication has",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorValidation(Answer):
    """Measured coverage of error intervals: rules fitted to the other publications judge each one.

    Attributes:
        runs: the table of published runs.
        outcomes: published runs that fit or ran out of memory.
        times, ratios, peaks: coverage for step times, ratios of two step times, and memory peaks.
        fits: reliability of the probabilities of fitting; None if there are too few publications.
        rules: rules fitted to all rows.
        stale: rows of the package that are no longer predicted so; None if no row was predicted.
        fresh: rows whose prediction changed, or that the package does not have.
        left: rows that were not predicted because of `Selection.most`; they are not in `runs`.
    """

    runs: tuple[JudgedRun, ...]
    outcomes: tuple[MemoryOutcome, ...]
    times: tuple[ErrorCoverage, ...]
    ratios: tuple[ErrorCoverage, ...]
    peaks: tuple[ErrorCoverage, ...]
    fits: FitReport | None
    rules: ErrorRules
    stale: int | None = None
    fresh: int | None = None
    left: int = 0

    def text(self) -> str:
        """Return tables of coverage, and of the probability of fitting."""
        names = len({run.publication for run in self.runs})
        lines = [f"{len(self.runs):,} published runs of {names:,} publications, each left out"]
        if self.stale is not None:
            lines.append(f"made again: {self.stale:,} rows that ship are stale, {self.fresh:,} new")
        if self.left:
            lines.append(f"not predicted, and not in the table: {self.left:,} rows")
        for title, found in self._tables().items():
            lines += ["", f"{title} (target {LEVEL:.0%} inside):", _table(found)]
        lines += ["", *LEGEND]
        if self.fits is not None:
            lines += ["", *_fit_lines(self.fits)]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate error --json` prints."""
        return {
            "runs": len(self.runs),
            "publications": len({run.publication for run in self.runs}),
            "stale": self.stale,
            "new": self.fresh,
            "left": self.left,
            "step_time": [asdict(each) for each in self.times],
            "ratio": [asdict(each) for each in self.ratios],
            "peak_memory": [asdict(each) for each in self.peaks],
            "fits": None if self.fits is None else asdict(self.fits),
        }

    def write(self, path: str | PathLike[str]) -> None:
        """Write the table to `path`, and the rules fitted to it to the same folder.

        Raises:
            UnwrittenError: a file cannot be written.
        """
        write(Path(path), evidence.table_text(self.runs, self.outcomes))
        write(Path(path).with_name(FILE), self.rules.text())

    def _tables(self) -> dict[str, tuple[ErrorCoverage, ...]]:
        return {
            "step time": self.times,
            "ratio of two step times": self.ratios,
            "peak of memory, sweeps in place of publications": self.peaks,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rows to predict again, and where their forecasts are kept.

    Attributes:
        tables: names of the tables to predict; rows of other publications are kept. Empty for all.
        resume: file that keeps forecasts; a later run reads it and predicts only the others.
        most: maximum of rows to predict in addition to those in the file; None for all.
    """

    tables: Sequence[str] = ()
    resume: Path | None = None
    most: int | None = None

    def forecasts(
        self, asked: Sequence[Asked], progress: Progress
    ) -> list[RunForecast | str | None]:
        """Return forecasts of runs; None for runs that are left."""
        if self.resume is None:
            return forecasts(asked, progress)
        return resumed(asked, self.resume, progress, most=self.most)


EVERYTHING = Selection()


def validate_error(
    folder: str | PathLike[str] | None = None,
    *,
    figures: bool = False,
    selection: Selection = EVERYTHING,
    progress: Progress = ignore_progress,
) -> ErrorValidation:
    """Return how often published values are inside the intervals fitted to other publications.

    Args:
        folder: folder of published tables to predict again; without it, use the table of the
            package.
        figures: with a folder, also predict the figures of papers again; else use the rows of
            the package.
        selection: with a folder, the tables to predict, and the file that keeps forecasts.
        progress: callback that receives the number of rows predicted, and of all rows.

    Raises:
        MistakeError: there is nothing to read, a table is unknown, or there is one publication.
    """
    ships = judged_runs()
    if folder is None:
        return _validation(ships, memory_outcomes())
    own = _selected(Path(folder), selection.tables)
    sweeps = {(citation, sweep) for citation, sweep, *_ in figure_runs()}
    again = {TABLES[name].publication for name in selection.tables or TABLES}
    made, outcomes, left = made_again(own, progress, selection)
    if figures:
        made += judged_figures(progress)
    else:
        made += [
            run
            for run in ships
            if (run.citation, run.sweep) in sweeps or run.publication not in again
        ]
    outcomes += [each for each in memory_outcomes() if each.publication not in again]
    stale, fresh = different(ships, made)
    found = _validation(made, outcomes, stale=stale, fresh=fresh)
    return replace(found, left=left)


def _selected(folder: Path, tables: Sequence[str]) -> list[Published]:
    """Return the runs in `folder` of the publications of `tables`; of all if it is empty.

    Raises:
        MistakeError: there is nothing to read, or no such table.
    """
    found = published_runs(folder)
    for name in tables:
        if name not in found:
            raise MistakeError(f"--table: {name!r} must be one of {', '.join(found)}")
    again = {TABLES[name].publication for name in tables or found}
    return [
        run for name, runs in found.items() if TABLES[name].publication in again for run in runs
    ]


def made_again(
    runs: Sequence[Published], progress: Progress, selection: Selection = EVERYTHING
) -> tuple[list[JudgedRun], list[MemoryOutcome], int]:
    """Predict `runs` again; return rows with a step time to compare, and outcomes in memory.

    Runs that fit count as outcomes even if their step time is not compared. With the failed runs
    of a sweep alone, no run near the limit would have fitted. The third result is the number of
    rows that were not predicted.
    """
    own = [
        run for run in runs if judges(run) or (run.alternatives and (run.failed or run.peak_bytes))
    ]
    quantity = {True: Quantity.STEP_TIME, False: Quantity.MEMORY}
    made = selection.forecasts([question_of(run, quantity[judges(run)]) for run in own], progress)
    found: list[JudgedRun] = []
    for run, forecast in zip(own, made, strict=True):
        if isinstance(forecast, RunForecast) and judges(run):
            of_run = scenario_features(run.alternatives[forecast.alternative])
            if isinstance(of_run, RunFeatures):
                found.append(judged_row(run, forecast, of_run))
    return found, memory_outcomes_of(own, made), sum(each is None for each in made)


def _validation(
    runs: Sequence[JudgedRun],
    outcomes: Sequence[MemoryOutcome],
    *,
    stale: int | None = None,
    fresh: int | None = None,
) -> ErrorValidation:
    if len({run.publication for run in runs}) < 2:
        raise MistakeError(
            "--data: has runs of one publication; two are needed to predict one from the other"
        )
    kept = scored(runs)
    pipelines = ["with a pipeline" if run.features.pipeline > 1 else "without" for run in kept]
    rows = time_rows(kept)
    times = left_out(time_fit(rows), rows, pipelines)
    pairs = ratio_rows(kept)
    of_pairs = [row for row, _ in pairs]
    ratios = left_out(ratio_fit(of_pairs), of_pairs, [str(count) for _, count in pairs])
    peaks = peak_rows(kept)
    fitting = fit_rows(outcomes)
    return ErrorValidation(
        runs=tuple(runs),
        outcomes=tuple(outcomes),
        times=(coverage("all", times), *by_kind(times), *_of_known_runtimes(kept, times)),
        ratios=tuple(_renamed(each) for each in by_kind(ratios)),
        peaks=(coverage("all", left_out(ErrorFit(peaks), peaks, [""] * len(peaks))),)
        if len({row.group for row in peaks}) > 1
        else (),
        fits=fit_report(fitting) if len({row.group for row in fitting}) > 1 else None,
        rules=rules_of(runs, outcomes),
        stale=stale,
        fresh=fresh,
    )


def _of_known_runtimes(
    runs: Sequence[JudgedRun], times: Sequence[LeftOutRow]
) -> list[ErrorCoverage]:
    """Return the coverage of runs whose runtime another publication has, by kind."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for run in runs:
        names[run.features.runtime].add(run.publication)
    known = [
        replace(each, kind=f"{each.kind}, {KNOWN}")
        for run, each in zip(runs, times, strict=True)
        if len(names[run.features.runtime]) > 1
    ]
    return [coverage(KNOWN, known), *by_kind(known)] if known else []


def _renamed(found: ErrorCoverage) -> ErrorCoverage:
    return replace(found, kind=CHANGED[int(found.kind)])


def _table(found: Sequence[ErrorCoverage]) -> str:
    rows = [
        (
            each.kind,
            f"{each.rows:,}",
            f"{each.groups}",
            f"{each.inside:.1%}",
            f"{each.inside_groups:.1%}",
            f"{each.score:.2f}",
            f"{each.score_groups:.2f}",
            f"{each.half_width:.1%}",
        )
        for each in found
    ]
    return table_text(COLUMNS, rows)


def _fit_lines(found: FitReport) -> list[str]:
    rows = [
        (
            f"{each.least:.1f} to {each.most:.1f}",
            f"{each.runs:,}",
            f"{each.predicted:.1%}",
            f"{each.ran:.1%}",
        )
        for each in found.reliability
    ]
    return [
        f"fits: {found.ran:,} of {found.runs:,} published runs; Brier score {found.brier:.3f} "
        f"(the share of all: {found.always:.3f})",
        table_text(("probability", "runs", "predicted", "fitted"), rows),
    ]
