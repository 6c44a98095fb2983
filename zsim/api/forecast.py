"""Forecasts of training runs, as `zsim run` makes them: schedule, simulation, figures."""

import gc
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from zsim.api.counted_work import count_work
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.backend.backend import Backend, BackendError, Job, NoRouteError, RunFailedError
from zsim.mistake import MistakeError
from zsim.runtimes.lookup import runtimes
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.units import PICOSECONDS_PER_SECOND

if TYPE_CHECKING:
    from zsim.analysis.memory_footprint import Footprint
    from zsim.files.source import Source

FEW = 3
"""Number of micro-batches of a step to simulate; the rest are extrapolated from the last."""

MANY_STAGES = 8
"""Minimum stages at which one micro-batch is checked first for memory, which is much faster."""

FORECASTS_AT_ONCE = 4
"""Number of runs that a worker process gets at a time."""

OBJECTS_KEPT = 5_000_000
"""Objects that a process allocates before it collects garbage: a few hundred MB."""

HIDDEN = 1e-3
"""Fraction by which a micro-batch may be shorter than the busiest stage and count as equal."""

RUN_FAULTS = (MistakeError, BackendError, RunFailedError, NoRouteError, ValueError)
"""Exceptions for which a run has no forecast; each message is one line."""


class _Timer(Protocol):
    """The part of the simulator that returns when steps end."""

    def step_ends_ps(self, job: Job, *, waits: bool) -> tuple[int, ...]:
        """Return the end of each step in picoseconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Forecast of a run, and the data needed to extrapolate it to more micro-batches.

    Attributes:
        waits: True if a host waits for memory in the last step.
        busiest_stage_s: seconds of a micro-batch on the busiest stage; 0 without a pipeline.
    """

    forecast: RunForecast
    waits: bool
    busiest_stage_s: float


Alternatives = Sequence[Mapping[str, object]]
"""Scenario tables of one run, in order of preference: the first that fits is the run."""

Asked = tuple[Alternatives, Quantity | None]
"""A run and the quantity to predict; None asks only whether it fits, and figures may be bounds."""


def forecasts(
    runs: Sequence[Asked], progress: Callable[[int, int], object] = lambda done, of: None
) -> list[RunForecast | str | None]:
    """Return forecasts of runs, using all processors; equal runs are predicted once.

    A string instead of a forecast is the reason why there is none; None means a run without
    scenarios. zsim simulates only as much as the quantity needs. `progress` receives the number of
    runs done and of all runs.
    """
    keys = [(json.dumps(alternatives, sort_keys=True), quantity) for alternatives, quantity in runs]
    asked = {key: each for key, each in zip(keys, runs, strict=True) if each[0]}
    workers = min(len(asked), os.cpu_count() or 1)
    make = _collected if workers > 1 else _forecast_of
    found: dict[tuple[str, Quantity | None], RunForecast | str] = {}
    pool_of = partial(ProcessPoolExecutor, workers, initializer=gc.disable)
    with pool_of() if workers > 1 else nullcontext() as pool:
        made = (
            map(make, asked.values())
            if pool is None
            else pool.map(make, asked.values(), chunksize=FORECASTS_AT_ONCE)
        )
        for key, each in zip(asked, made, strict=True):
            found[key] = each
            progress(len(found), len(asked))
    return [found.get(key) for key in keys]


def _forecast_of(each: Asked) -> RunForecast | str:
    return first_that_fits(*each)


def _collected(each: Asked) -> RunForecast | str:
    """Return the forecast of `first_that_fits`, and collect garbage if there may be much."""
    found = first_that_fits(*each)
    collect_garbage()
    return found


def collect_garbage() -> None:
    """Collect garbage if there may be much; for processes with the garbage collector disabled.

    In between almost nothing is garbage, and looking for it takes a sixth of the time.
    """
    if gc.get_count()[0] > OBJECTS_KEPT:
        gc.collect()


def first_that_fits(
    alternatives: Alternatives, quantity: Quantity | None = Quantity.STEP_TIME
) -> RunForecast | str:
    """Return the forecast of the first of `alternatives` that fits, else of the last.

    Each scenario needs less memory than the one before. So if the question is only whether one
    fits, try the last first: if it does not fit, none does.
    """
    *others, last = alternatives
    if others and quantity is None:
        least = forecast(last, None)
        if isinstance(least, RunForecast) and not least.fits:
            return _of_alternative(len(others), least)
    for alternative, tables in enumerate(others):
        found = forecast(tables, None)
        if isinstance(found, str) or found.fits:
            return (
                found
                if quantity is None
                else _of_alternative(alternative, forecast(tables, quantity))
            )
    return _of_alternative(len(others), forecast(last, quantity))


def _of_alternative(alternative: int, found: RunForecast | str) -> RunForecast | str:
    return found if isinstance(found, str) else replace(found, alternative=alternative)


def forecast(
    tables: Mapping[str, object], quantity: Quantity | None = Quantity.STEP_TIME
) -> RunForecast | str:
    """Return the forecast for the scenario in `tables`, or the reason why there is none.

    Of many micro-batches zsim simulates a few and extrapolates: each later one takes as long as
    the one before (in a pipeline, after the fill). For `Quantity.MEMORY` the step time is that
    of the simulated micro-batches. For None there may be no step time, and memory may be a bound.
    """
    train = tables.get("train")
    steps = train.get("gradient_accumulation_steps") if isinstance(train, dict) else None
    few, turn = simulated_micro_batches(tables)
    if quantity is not Quantity.STEP_TIME:
        least = max(FEW, few - turn)
        many = isinstance(steps, int) and steps > few
        enough = accumulating(tables, least) if many else tables
        if quantity is not None:
            return _of_memory(enough)
        is_one_asked = turn == 1 and few > MANY_STAGES and steps != 1
        one = accumulating(tables, 1) if is_one_asked else None
        lack = None if one is None else _certain_out_of_memory(one)
        return lack or _whether_it_fits(enough)
    if not isinstance(steps, int) or steps <= few:
        return _simulated(tables)
    return _extended(tables, steps, few, turn=turn)


def simulated_micro_batches(tables: Mapping[str, object]) -> tuple[int, int]:
    """Return the number of micro-batches to simulate, and the number that take turns as a group.

    Pipeline stages with several chunks process groups of as many micro-batches as there are
    stages. If stages receive each micro-batch into separate memory, all are simulated.
    """
    parallel, zero = tables.get("parallel"), tables.get("zero")
    stages = parallel.get("pipeline", 1) if isinstance(parallel, dict) else 1
    if stages == 1:
        return FEW, 1
    zero = zero if isinstance(zero, dict) else {}
    kinds = {name: each.options for name, each in runtimes().items()}
    if kinds.get(str(zero.get("emulate")), RuntimeOptions).receives_separately:
        train = tables.get("train")
        steps = train.get("gradient_accumulation_steps") if isinstance(train, dict) else None
        return (steps if isinstance(steps, int) else stages), 1
    for name, kind in kinds.items():
        options = zero.get(name)
        if isinstance(options, dict) and kind.has_chunks(options, stages=stages):
            return 3 * stages, stages
    return stages + 1, 1


def _extended(
    tables: Mapping[str, object], steps: int, few: int, *, turn: int
) -> RunForecast | str:
    """Extrapolate the forecast of `steps` micro-batches from `few` and from one `turn` less.

    With one turn less a rank needs at most as much memory, so a host waits for memory only if it
    does with `few`. If the busiest stage takes longer than the extrapolated micro-batch, the fill
    phase still hides it in the few micro-batches; then simulate all, or as many as possible.
    """
    try:
        made = _run(accumulating(tables, few))
        found, waits = made.forecast, made.waits
        less_s = _seconds(tables, few - turn, waits=waits or not found.fits)
    except RUN_FAULTS as error:
        return str(error)
    each_s = (found.step_time_s - less_s) / turn
    all_s = found.step_time_s + (steps - few) * each_s
    if each_s < made.busiest_stage_s * (1 - HIDDEN):
        waits = waits or not found.fits
        all_s = _of_more(tables, steps, few, turn=turn, waits=waits) or all_s
    return replace(found, step_time_s=all_s)


def _of_more(
    tables: Mapping[str, object], steps: int, few: int, *, turn: int, waits: bool
) -> float | None:
    """Return the seconds of a step of `steps` micro-batches, from more than `few` of them.

    If `steps` are too many to simulate, try half as many, a quarter and so on, and extrapolate the
    rest from the last turn. Return None if no more than `few` can be simulated.
    """
    count = steps
    while count > few:
        try:
            step_s = _seconds(tables, count, waits=waits)
            less_s = step_s if count == steps else _seconds(tables, count - turn, waits=waits)
        except RUN_FAULTS:  # more operations than a schedule may have
            count = count // 2 // turn * turn
            continue
        return step_s + (steps - count) * (step_s - less_s) / turn
    return None


def _seconds(tables: Mapping[str, object], steps: int, *, waits: bool) -> float:
    """Return the duration in seconds of a step of `steps` micro-batches."""
    source = settled_source(accumulating(tables, steps))
    job = source.job()
    count_work(job)
    return last_step_s(job, source.simulation(), waits=waits)


def accumulating(tables: Mapping[str, object], steps: int) -> dict[str, object]:
    """Return a copy of `tables` with `steps` micro-batches in a step."""
    changed: dict[str, Any] = deepcopy(dict(tables))
    changed["train"]["gradient_accumulation_steps"] = steps
    return changed


def _certain_out_of_memory(tables: Mapping[str, object]) -> RunForecast | None:
    """Return a forecast of the peak if a rank certainly runs out of memory; else None.

    More micro-batches need at least as much memory. So one micro-batch may settle the question for
    a pipeline, and its schedule takes a fraction of the time to write.
    """
    from zsim.analysis.memory_footprint import certain_out_of_memory

    try:
        job = settled_source(tables).job()
        count_work(job)
        found = certain_out_of_memory(job)
    except RUN_FAULTS:
        return None
    return None if found is None else memory_forecast(found)


def _whether_it_fits(tables: Mapping[str, object]) -> RunForecast | str:
    """Forecast whether a run fits; simulate only if its allocations do not settle it."""
    from zsim.analysis.memory_footprint import certain_footprint

    try:
        job = settled_source(tables).job()
        count_work(job)
        found = certain_footprint(job)
    except RUN_FAULTS as error:
        return str(error)
    return _simulated(tables) if found is None else memory_forecast(found)


def _of_memory(tables: Mapping[str, object]) -> RunForecast | str:
    """Return a forecast of memory, without a step time unless memory depends on timing."""
    from zsim.analysis.memory_footprint import DependsOnTimeError, footprint

    try:
        return memory_forecast(footprint(settled_source(tables).job()))
    except DependsOnTimeError:
        return _simulated(tables)
    except RUN_FAULTS as error:
        return str(error)


def memory_forecast(found: "Footprint") -> RunForecast:
    """Return the forecast of the memory alone, with a step time of 0."""
    return RunForecast(
        step_time_s=0.0,
        peak_allocated_bytes=found.allocated_bytes,
        peak_reserved_bytes=found.reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
        kept_bytes=found.kept_bytes,
    )


def _simulated(tables: Mapping[str, object]) -> RunForecast | str:
    try:
        return _run(tables).forecast
    except RUN_FAULTS as error:
        return str(error)


def _run(tables: Mapping[str, object]) -> _Made:
    """Return the forecast of a run.

    The last forecast is cached, since the same run may be checked for fitting first.
    """
    text = json.dumps(tables, sort_keys=True)
    count_work(_resolved(text).job())
    return _run_of(text)


@lru_cache(maxsize=1)
def _run_of(text: str) -> _Made:
    from zsim.analysis.memory_footprint import most_kept_bytes
    from zsim.analysis.stage_times import busiest_stage_s
    from zsim.analysis.summary import summary

    source = _resolved(text)
    job = source.job()
    trace = source.simulation().run(job, seed=0)
    found = summary(job, trace)
    forecast = RunForecast(
        step_time_s=found.step_time_s,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
        kept_bytes=most_kept_bytes(job),
    )
    strategy = job.schedule.contract.strategy
    assert strategy is not None
    axes, turn = strategy.parallel, strategy.train.gradient_accumulation_steps // 2
    return _Made(
        forecast=forecast,
        waits=found.memory_wait_s > 0,
        busiest_stage_s=0.0 if axes.pipeline == 1 else busiest_stage_s(job.schedule, trace, turn),
    )


def last_step_s(job: Job, backend: Backend, *, waits: bool = True) -> float:
    """Return the seconds of the last step of `job`, simulated without recording a trace.

    `waits=False` asserts that no host waits for memory, which makes the simulation faster.
    """
    *before, end_ps = cast("_Timer", backend).step_ends_ps(job, waits=waits)
    return (end_ps - (before[-1] if before else 0)) / PICOSECONDS_PER_SECOND


def settled_source(tables: Mapping[str, object]) -> "Source":
    """Return the resolved scenario; the last two are cached, with their schedules."""
    return _resolved(json.dumps(tables, sort_keys=True))


@lru_cache(maxsize=2)
def _resolved(text: str) -> "Source":
    from zsim.files.source import resolved
    from zsim.scenario.tables import from_tables

    return resolved("scenario", from_tables(json.loads(text)), quiet=True)  # told by the caller
