"""Rows of the table of judged runs: which published rows judge, and what is predicted of them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import sha256

from zsim.calibration.memory_fit import undominated
from zsim.calibration.published import Published
from zsim.calibration.training_tables import TABLES
from zsim.calibration.training_verdict import Quantity, RunForecast, predicted
from zsim.prediction.evidence import JudgedRun, MemoryOutcome, flat
from zsim.prediction.run_features import RunFeatures

DIGITS = 6
"""Digits of seconds in the table."""


def judges(run: Published) -> bool:
    """Return whether `run` is a row of the table: it has a step time, which fitted no constant."""
    if run.step_time_s is None or not run.ways:
        return False
    return run.judged or TABLES[run.file].judges


def judged_row(run: Published, forecast: RunForecast, features: RunFeatures) -> JudgedRun:
    """Return the row of `run`, whose way `forecast.way` was predicted and has `features`."""
    assert run.step_time_s is not None
    tables, has_peak = run.ways[forecast.way], run.peak_bytes is not None
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
    """Return the runs with a published peak, and those that memory may have ended.

    These are runs without a result that no run with one dominates (`zsim.calibration.memory_fit`).
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
    """Return the name that the table has for the sweep of `run`."""
    return sha256("\0".join(map(str, run.sweep)).encode()).hexdigest()[:8]


def rounded(seconds: float) -> float:
    """Return `seconds` with the digits of the table."""
    return float(f"{seconds:.{DIGITS}g}")


def different(ships: Iterable[JudgedRun], made: Iterable[JudgedRun]) -> tuple[int, int]:
    """Return how many rows ship and are not made any more, and how many are new."""
    old, new = (Counter(map(_key, runs)) for runs in (ships, made))
    return (old - new).total(), (new - old).total()


def _key(run: JudgedRun) -> tuple[object, ...]:
    """Return all of a row, as a key."""
    settings = tuple(sorted((name, str(value)) for name, value in run.settings.items()))
    figures = (run.step_s, run.predicted_step_s, run.peak_bytes, run.predicted_peak_bytes)
    return (run.publication, run.citation, run.sweep, run.fitted, figures, run.features, settings)
