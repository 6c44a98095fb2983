"""Forecasts of runs of training, as `zsim run` makes them: schedule, simulation, figures."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from zsim.backend.backend import BackendError, NoWayError, RunFailedError
from zsim.calibration.training_verdict import Quantity, RunForecast
from zsim.mistake import MistakeError

FEW = 3
"""Micro-batches of a step that are simulated; those that follow are like the last."""

FORECASTS_AT_ONCE = 4
"""Runs that a process is handed at a time."""


Ways = Sequence[Mapping[str, object]]
"""Scenarios of one run, as their tables: the first that fits is what was run."""


def forecasts(
    runs: Sequence[Ways],
    quantity: Quantity = Quantity.STEP_TIME,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> list[RunForecast | str | None]:
    """Return forecasts of runs, on all processors; equal ones are made once.

    A line instead of a forecast says why there is none; None stands for a run without scenarios.
    For peaks of memory alone no more is simulated than they need. `told` hears how many are made,
    and of how many.
    """
    texts = [json.dumps(each, sort_keys=True) if each else "" for each in runs]
    ways = {text: each for text, each in zip(texts, runs, strict=True) if text}
    workers = min(len(ways), os.cpu_count() or 1)
    make = partial(first_that_fits, quantity=quantity)
    found: dict[str, RunForecast | str] = {}
    with ProcessPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        made = (
            map(make, ways.values())
            if pool is None
            else pool.map(make, ways.values(), chunksize=FORECASTS_AT_ONCE)
        )
        for text, each in zip(ways, made, strict=True):
            found[text] = each
            told(len(found), len(ways))
    return [found.get(text) for text in texts]


def first_that_fits(ways: Ways, quantity: Quantity = Quantity.STEP_TIME) -> RunForecast | str:
    """Return the forecast of the first of `ways` that fits; of the last, where none does.

    Whether one fits is asked of its memory alone, which takes a fraction of a simulation.
    """
    *others, last = ways
    for tables in others:
        found = forecast(tables, Quantity.MEMORY)
        if isinstance(found, str) or found.fits:
            return found if quantity is Quantity.MEMORY else forecast(tables, quantity)
    return forecast(last, quantity)


def forecast(
    tables: Mapping[str, object], quantity: Quantity = Quantity.STEP_TIME
) -> RunForecast | str:
    """Return what is predicted for the scenario in `tables`, or in a line why nothing is.

    Of many micro-batches few are simulated: each after the first takes as long as the one before;
    in a pipeline, each after those that fill it. Where memory is asked for, the step time is that
    of the few.
    """
    train, parallel = tables.get("train"), tables.get("parallel")
    steps = train.get("gradient_accumulation_steps") if isinstance(train, dict) else None
    stages = parallel.get("pipeline", 1) if isinstance(parallel, dict) else 1
    few = FEW if stages == 1 else stages + 1
    if quantity is Quantity.MEMORY:
        least = FEW if stages == 1 else stages
        many = isinstance(steps, int) and steps > few
        return _of_memory(accumulating(tables, least) if many else tables)
    if not isinstance(steps, int) or steps <= few:
        return _simulated(tables)
    fewer = _simulated(accumulating(tables, few - 1))
    if isinstance(fewer, str):
        return fewer
    more = _simulated(accumulating(tables, few))
    if isinstance(more, str):
        return more
    each_s = more.step_time_s - fewer.step_time_s
    return replace(more, step_time_s=more.step_time_s + (steps - few) * each_s)


def accumulating(tables: Mapping[str, object], steps: int) -> dict[str, object]:
    """Return `tables` with so many micro-batches in a step."""
    changed: dict[str, Any] = deepcopy(dict(tables))
    changed["train"]["gradient_accumulation_steps"] = steps
    return changed


def _of_memory(tables: Mapping[str, object]) -> RunForecast | str:
    """RunForecast memory; what depends on no time is not simulated, and has no step time."""
    from zsim.analysis.memory_footprint import DependsOnTimeError, footprint
    from zsim.files.source import resolved
    from zsim.scenario.tables import from_tables

    try:
        found = footprint(resolved("scenario", from_tables(tables)).job())
    except DependsOnTimeError:
        return _simulated(tables)
    except (MistakeError, BackendError, ValueError) as error:
        return str(error)
    return RunForecast(
        step_time_s=0.0,
        peak_allocated_bytes=found.allocated_bytes,
        peak_reserved_bytes=found.reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
    )


def _simulated(tables: Mapping[str, object]) -> RunForecast | str:
    from zsim.analysis.summary import summary
    from zsim.files.source import resolved
    from zsim.scenario.tables import from_tables

    try:
        source = resolved("scenario", from_tables(tables))
        job = source.job()
        found = summary(job, source.simulation().run(job, seed=0))
    except (MistakeError, BackendError, RunFailedError, NoWayError, ValueError) as error:
        return str(error)
    return RunForecast(
        step_time_s=found.step_time_s,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
    )
