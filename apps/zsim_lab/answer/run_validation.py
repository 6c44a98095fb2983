"""Compare published training runs with their predictions: step times, or peaks of memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from zsim.api.answer import Progress, ignore_progress
from zsim.api.forecast import forecasts
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.files.installed import network_profiles
from zsim.files.output_file import is_folder
from zsim.mistake import MistakeError
from zsim_lab.answer.validation import Validation
from zsim_lab.rows.measurements import measurements_of, not_read, published_runs, runs_of
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.memory_fit import ABOVE, NEAR, MemoryFit, fit
from zsim_lab.verdict.network_verdict import verdict as network_verdict
from zsim_lab.verdict.training_verdict import published, question_of, verdict
from zsim_lab.verdict.verdict import Fact, Verdict

__all__ = ["Quantity", "validate_all_rows", "validate_training"]

Forecasts = Mapping[int, RunForecast | str | None]
"""Forecasts of a table by line, or why there is none."""


def validate_training(folder: str | PathLike[str], quantity: Quantity) -> Validation:
    """Return how well `quantity` is predicted of the published runs in `folder`.

    Raises:
        MistakeError: there is nothing to read.
    """
    found: list[Verdict] = []
    for name, runs in published_runs(Path(folder)).items():
        some = _with(quantity, runs)
        if any(published(run, quantity) is not None for run in some):
            made = forecasts([question_of(run, quantity) for run in some])
            by_line = dict(zip((run.line for run in some), made, strict=True))
            whole = name in TABLES and TABLES[name].judges
            found.append(_verdict(name, quantity, some, by_line, whole=whole))
    if not found:
        raise MistakeError(f"{folder}: no row has a {quantity}")
    return _validation({"": found}, Path(folder))


def validate_all_rows(
    folder: str | PathLike[str], *, progress: Progress = ignore_progress
) -> Validation:
    """Return how well everything in `folder` is predicted; no row is taken as fitted.

    Raises:
        MistakeError: there is nothing to read.
    """
    path = Path(folder)
    if not is_folder("data", path):
        raise MistakeError(f"{folder}: no such folder")
    profiles = network_profiles()
    found = {
        "collectives:": [
            network_verdict(name, rows, left, profiles)
            for name, (rows, left) in measurements_of(path).items()
        ]
    }
    tables = runs_of(path)
    if not found["collectives:"] and not tables:
        raise MistakeError(f"{folder}: holds no table of a form that is known")
    made = _all_forecasts([run for runs in tables.values() for run in runs], progress)
    for quantity in Quantity:
        found[f"{quantity}:"] = [
            _verdict(name, quantity, some, made[name], whole=True)
            for name, runs in tables.items()
            for some in (_with(quantity, runs),)
            if any(not run.reason for run in some)
        ]
    return _validation({title: own for title, own in found.items() if own}, path)


def _validation(found: Mapping[str, Sequence[Verdict]], folder: Path) -> Validation:
    left = not_read(folder)
    notes = (f"not read, of a form that is not known: {', '.join(left)}",) if left else ()
    return Validation(verdicts=found, notes=notes, more={"not_read": list(left)})


def _with(quantity: Quantity, runs: Sequence[Published]) -> list[Published]:
    """Return the runs that published the quantity, of memory also those without a result."""
    memory = quantity is Quantity.MEMORY
    return [
        run
        for run in runs
        if run.reason or published(run, quantity) is not None or (memory and run.failed)
    ]


def _all_forecasts(runs: Sequence[Published], progress: Progress) -> dict[str, Forecasts]:
    """Predict each row once, and of rows without a step time memory alone, by file and line."""

    def report(done: int, of: int) -> None:
        progress(done * len(runs) // of, len(runs))

    most = [Quantity.MEMORY if run.step_time_s is None else Quantity.STEP_TIME for run in runs]
    made = forecasts([question_of(run, each) for run, each in zip(runs, most, strict=True)], report)
    found: dict[str, dict[int, RunForecast | str | None]] = {run.file: {} for run in runs}
    for run, each in zip(runs, made, strict=True):
        found[run.file][run.line] = each
    return {**found}


def _verdict(
    name: str, quantity: Quantity, runs: Sequence[Published], made: Forecasts, *, whole: bool
) -> Verdict:
    found = [made[run.line] for run in runs]
    report = verdict(name, quantity, runs, found, whole=whole)
    fits = fit(name, runs, found) if quantity is Quantity.MEMORY else None
    return report if fits is None else replace(report, facts=(*report.facts, _fit_fact(fits)))


def _fit_fact(found: MemoryFit) -> Fact:
    """Return the shares of failed and of finished runs whose fit is predicted wrongly."""
    refused = found.refused / found.without if found.without else 1.0
    wrong = len(found.wrong) / found.results if found.results else 0.0
    line = (
        f"of {found.without} rows without a result that no successful row dominates "
        f"{found.refused} ({refused:.1%}) are predicted above the limit or within {NEAR:.0%} of "
        f"it; of {found.results} with one {len(found.wrong)} ({wrong:.1%}) are predicted more than "
        f"{ABOVE:.0%} above it"
    )
    none = f"the trainer begins no run of {found.not_begun} rows without a result"
    value = {
        "not_begun": found.not_begun,
        "without_result": found.without,
        "predicted_not_to_fit": found.refused,
        "with_result": found.results,
        "predicted_far_above_limit": len(found.wrong),
        "rows_far_above_limit": [run.line for run in found.wrong],
    }
    return Fact(name="fit", value=value, lines=(*([none] if found.not_begun else []), line))
