"""Rows of the table of published runs: select published rows that judge, with predictions."""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256

from zsim.api.run_forecast import Quantity, RunForecast
from zsim.prediction.evidence import JudgedRun, MemoryOutcome, flat
from zsim.prediction.run_features import RunFeatures
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.memory_fit import undominated
from zsim_lab.verdict.training_verdict import predicted

DIGITS = 6
"""Significant digits of seconds in the table."""


def judges(run: Published) -> bool:
    """Return True if `run` judges predictions: it has a step time that was not used in a fit."""
    if run.step_time_s is None or not run.alternatives:
        return False
    return run.judged or TABLES[run.file].judges


def judged_row(run: Published, forecast: RunForecast, features: RunFeatures) -> JudgedRun:
    """Return the row of `run`, with the `forecast` of its scenario and its `features`."""
    assert run.step_time_s is not None
    tables, has_peak = run.alternatives[forecast.alternative], run.peak_bytes is not None
    return JudgedRun(
        publication=TABLES[run.file].publication,
        citation=run.source.rpartition("; ")[2],
        sweep=sweep_of(run),
        step_s=rounded(run.step_time_s),
        predicted_step_s=rounded(forecast.step_time_s),
        peak_bytes=run.peak_bytes,
        predicted_peak_bytes=round(predicted(run, Quantity.MEMORY, forecast)) if has_peak else None,
        features=features,
        settings=flat({name: table for name, table in tables.items() if name != "title"}),
        fitted=run.fitted,
    )


def memory_outcomes_of(
    runs: Sequence[Published], forecasts: Sequence[RunForecast | str | None]
) -> list[MemoryOutcome]:
    """Return the outcomes of runs with a published peak, and of those that memory may have ended.

    The latter have no result, and no run with one dominates them (`zsim_lab.verdict.memory_fit`).
    """
    made = [
        (run, forecast)
        for run, forecast in zip(runs, forecasts, strict=True)
        if isinstance(forecast, RunForecast)
    ]
    lines = {(run.file, run.line) for run in undominated([run for run, _ in made])}
    return [
        MemoryOutcome(
            publication=TABLES[run.file].publication,
            sweep=sweep_of(run),
            needed_bytes=forecast.needed_bytes,
            usable_bytes=forecast.usable_bytes,
            ran=not run.failed,
        )
        for run, forecast in made
        if (run.file, run.line) in lines or (run.peak_bytes is not None and not run.fitted)
    ]


def sweep_of(run: Published) -> str:
    """Return the name of the sweep of `run` in the table."""
    return sha256("\0".join(map(str, run.sweep)).encode()).hexdigest()[:8]


def rounded(seconds: float) -> float:
    """Return `seconds` with the digits of the table."""
    return float(f"{seconds:.{DIGITS}g}")


def different(ships: Iterable[JudgedRun], made: Iterable[JudgedRun]) -> tuple[int, int]:
    """Return the number of packaged rows that were not made again, and the number of new rows."""
    old, new = (Counter(map(_key, runs)) for runs in (ships, made))
    return (old - new).total(), (new - old).total()


def _key(run: JudgedRun) -> tuple[object, ...]:
    """Return all values of a row, as a key."""
    settings = tuple(sorted((name, str(value)) for name, value in run.settings.items()))
    figures = (run.step_s, run.predicted_step_s, run.peak_bytes, run.predicted_peak_bytes)
    return (run.publication, run.citation, run.sweep, run.fitted, figures, run.features, settings)
