"""Forecasts of runs of training, as `zsim run` makes them: schedule, simulation, figures."""

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from zsim.backend.backend import Backend, BackendError, Job, NoWayError, RunFailedError
from zsim.calibration.training_verdict import Quantity, RunForecast
from zsim.mistake import MistakeError
from zsim.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from zsim.files.source import Source

FEW = 3
"""Micro-batches of a step that are simulated; those that follow are like the last."""

FORECASTS_AT_ONCE = 4
"""Runs that a process is handed at a time."""


RUN_FAULTS = (MistakeError, BackendError, RunFailedError, NoWayError, ValueError)
"""Why a run has no forecast, each in one line."""


class _Timer(Protocol):
    """The simulation, as far as it is asked when steps end."""

    def step_ends_ps(self, job: Job, *, waits: bool) -> tuple[int, ...]:
        """Return picoseconds after which each step has ended."""
        ...


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
    make = partial(_collected if workers > 1 else first_that_fits, quantity=quantity)
    found: dict[str, RunForecast | str] = {}
    pool_of = partial(ProcessPoolExecutor, workers, initializer=gc.disable)
    with pool_of() if workers > 1 else nullcontext() as pool:
        made = (
            map(make, ways.values())
            if pool is None
            else pool.map(make, ways.values(), chunksize=FORECASTS_AT_ONCE)
        )
        for text, each in zip(ways, made, strict=True):
            found[text] = each
            told(len(found), len(ways))
    return [found.get(text) for text in texts]


def _collected(ways: Ways, quantity: Quantity) -> RunForecast | str:
    """Return what `first_that_fits` does, and collect garbage afterwards.

    Meanwhile next to nothing is garbage, and looking for it takes a sixth of the time.
    """
    found = first_that_fits(ways, quantity)
    gc.collect()
    return found


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
    return _extended(tables, steps, few)


def _extended(tables: Mapping[str, object], steps: int, few: int) -> RunForecast | str:
    """Return what is predicted for `steps` micro-batches from `few` and from one less.

    With one less a rank needs no more memory: a host waits for none where it does not with `few`.
    """
    try:
        fewer = _source(accumulating(tables, few - 1))
        found, waits = _run(_source(accumulating(tables, few)))
        less_s = last_step_s(fewer.job(), fewer.simulation(), waits=waits or not found.fits)
    except RUN_FAULTS as error:
        return str(error)
    each_s = found.step_time_s - less_s
    return replace(found, step_time_s=found.step_time_s + (steps - few) * each_s)


def accumulating(tables: Mapping[str, object], steps: int) -> dict[str, object]:
    """Return `tables` with so many micro-batches in a step."""
    changed: dict[str, Any] = deepcopy(dict(tables))
    changed["train"]["gradient_accumulation_steps"] = steps
    return changed


def _of_memory(tables: Mapping[str, object]) -> RunForecast | str:
    """RunForecast memory; what depends on no time is not simulated, and has no step time."""
    from zsim.analysis.memory_footprint import DependsOnTimeError, footprint

    try:
        found = footprint(_source(tables).job())
    except DependsOnTimeError:
        return _simulated(tables)
    except RUN_FAULTS as error:
        return str(error)
    return RunForecast(
        step_time_s=0.0,
        peak_allocated_bytes=found.allocated_bytes,
        peak_reserved_bytes=found.reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
    )


def _simulated(tables: Mapping[str, object]) -> RunForecast | str:
    try:
        return _run(_source(tables))[0]
    except RUN_FAULTS as error:
        return str(error)


def _run(source: "Source") -> tuple[RunForecast, bool]:
    """Return the forecast of a run, and whether a host waits for memory in its last step."""
    from zsim.analysis.summary import summary

    job = source.job()
    found = summary(job, source.simulation().run(job, seed=0))
    forecast = RunForecast(
        step_time_s=found.step_time_s,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
    )
    return forecast, found.memory_wait_s > 0


def last_step_s(job: Job, backend: Backend, *, waits: bool = True) -> float:
    """Return the seconds of the last step of `job` in a simulation, of which nothing is recorded.

    Without `waits` no host is known to wait for memory.
    """
    *before, end_ps = cast("_Timer", backend).step_ends_ps(job, waits=waits)
    return (end_ps - (before[-1] if before else 0)) / PICOSECONDS_PER_SECOND


def _source(tables: Mapping[str, object]) -> "Source":
    """Return what a scenario comes to; the last two are kept, with their schedules."""
    return _resolved(json.dumps(tables, sort_keys=True))


@lru_cache(maxsize=2)
def _resolved(text: str) -> "Source":
    from zsim.files.source import resolved
    from zsim.scenario.tables import from_tables

    return resolved("scenario", from_tables(json.loads(text)))
