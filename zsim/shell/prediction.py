"""What a run of training would take, as `zsim run` says it: schedule, simulation, figures."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

from zsim.backend import BackendError, NoWayError, RunFailedError
from zsim.shell.mistake import MistakeError
from zsim.validation.verdict import Forecast

FEW = 3
"""Micro-batches of a step that are simulated; those that follow are like the last."""


Ways = Sequence[Mapping[str, object]]
"""Scenarios of one run, as their tables: the first that fits is what was run."""


def forecasts(runs: Sequence[Ways]) -> list[Forecast | str | None]:
    """Forecasts of runs, on all processors; equal ones are made once.

    A line instead of a forecast says why there is none; None stands for a run without scenarios.
    """
    texts = [json.dumps(each, sort_keys=True) if each else "" for each in runs]
    ways = {text: each for text, each in zip(texts, runs, strict=True) if text}
    workers = min(len(ways), os.cpu_count() or 1)
    if workers < 2:
        found = dict(zip(ways, map(first_that_fits, ways.values()), strict=True))
    else:
        with ProcessPoolExecutor(workers) as pool:
            made = pool.map(first_that_fits, ways.values(), chunksize=4)
            found = dict(zip(ways, made, strict=True))
    return [found.get(text) for text in texts]


def first_that_fits(ways: Ways) -> Forecast | str:
    """The forecast of the first of `ways` that fits; of the last, where none does."""
    found: Forecast | str = "no scenario"
    for tables in ways:
        found = forecast(tables)
        if isinstance(found, str) or found.fits:
            break
    return found


def forecast(tables: Mapping[str, object]) -> Forecast | str:
    """What is predicted for the scenario in `tables`, or in a line why nothing is.

    Of many micro-batches few are simulated: each after the first takes as long as the one before.
    """
    train = tables.get("train")
    steps = train.get("gradient_accumulation_steps") if isinstance(train, dict) else None
    if not isinstance(steps, int) or steps <= FEW:
        return _simulated(tables)
    fewer = _simulated(accumulating(tables, FEW - 1))
    if isinstance(fewer, str):
        return fewer
    few = _simulated(accumulating(tables, FEW))
    if isinstance(few, str):
        return few
    each_s = few.step_time_s - fewer.step_time_s
    return replace(few, step_time_s=few.step_time_s + (steps - FEW) * each_s)


def accumulating(tables: Mapping[str, object], steps: int) -> dict[str, object]:
    """`tables` with so many micro-batches in a step."""
    changed: dict[str, Any] = deepcopy(dict(tables))
    changed["train"]["gradient_accumulation_steps"] = steps
    return changed


def _simulated(tables: Mapping[str, object]) -> Forecast | str:
    from zsim.scenario import from_tables
    from zsim.shell.source import resolved
    from zsim.summary import summary

    try:
        source = resolved("scenario", from_tables(tables))
        job = source.job()
        found = summary(job, source.simulation().run(job, seed=0))
    except (MistakeError, BackendError, RunFailedError, NoWayError, ValueError) as error:
        return str(error)
    return Forecast(
        step_time_s=found.step_time_s,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
    )
