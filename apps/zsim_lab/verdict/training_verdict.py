"""Predicted runs of training beside published ones, as a verdict on each file."""

from collections.abc import Mapping, Sequence

from zsim.api.forecast import Asked, accumulating, settled_source, simulated_micro_batches
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.memory import memory_ledger
from zsim.memory import peak_bytes as peak_of
from zsim.schedule.schedule import Place
from zsim.units import format_bytes, format_seconds
from zsim_lab.rows.published import Published
from zsim_lab.verdict.error_growth import growth
from zsim_lab.verdict.verdict import Verdict, VerdictRow


def question_of(run: Published, quantity: Quantity) -> Asked:
    """Return `run` with the quantity to predict; for a failed run, only whether it fits."""
    return run.alternatives, None if run.failed else quantity


def published(run: Published, quantity: Quantity) -> float | None:
    """Return the published value of `run` in seconds or bytes; None if there is none."""
    return run.step_time_s if quantity is Quantity.STEP_TIME else run.peak_bytes


def predicted(run: Published, quantity: Quantity, forecast: RunForecast) -> float:
    """Return the predicted value of `run` in seconds or bytes."""
    if quantity is Quantity.STEP_TIME:
        return forecast.step_time_s
    if run.reserved:
        return forecast.needed_bytes
    peak_bytes = forecast.peak_allocated_bytes
    if run.of_last_rank:
        peak_bytes = last_peak_bytes(run.alternatives[forecast.alternative])
    return peak_bytes + run.library_bytes


def last_peak_bytes(tables: Mapping[str, object]) -> int:
    """Return the peak of allocated bytes of the last rank, with few micro-batches.

    Deferred frees return as late as possible.
    """
    few, _ = simulated_micro_batches(tables)
    train = tables["train"]
    assert isinstance(train, Mapping)
    steps = min(few, train["gradient_accumulation_steps"])
    job = settled_source(accumulating(tables, steps)).job()
    schedule = job.schedule
    entries = memory_ledger(schedule.program_of(schedule.mesh.size - 1), job.steps)
    device = [pool.name for pool in schedule.pools if pool.place is Place.DEVICE]
    return max(peak_of(entries, name) for name in device)


def verdict(
    file: str,
    quantity: Quantity,
    runs: Sequence[Published],
    forecasts: Sequence[RunForecast | str | None],
    *,
    whole: bool = False,
) -> Verdict:
    """Compare `runs` of `file` with their forecasts; with `whole`, no row fitted a constant.

    A forecast may be a string, the reason why there is none; it is None if the run is not
    modelled.
    """
    found: list[VerdictRow] = []
    left: list[tuple[int | str, str]] = []
    without = 0
    for run, forecast in zip(runs, forecasts, strict=True):
        value = published(run, quantity)
        refusal = "" if run.failed else run.refusal
        if run.reason or refusal or isinstance(forecast, str):
            left.append((run.line, run.reason or refusal or str(forecast)))
        elif run.failed:
            without += 1
        elif value is not None and forecast is not None:
            found.append(
                VerdictRow(
                    place=run.line,
                    name=f"line {run.line} ({run.hardware}, {run.model}, "
                    f"{run.sequence_length} tokens)",
                    published=value,
                    predicted=predicted(run, quantity, forecast),
                    is_kept=(whole or run.judged) and not run.fitted,
                    groups={"hardware": run.hardware, "parts": run.part, "extents": run.extent},
                    source=run,
                    alternative=forecast.alternative,
                )
            )
    grown = growth(found)
    return Verdict(
        name=file,
        quantity=quantity,
        rows=tuple(found),
        shown=format_seconds if quantity is Quantity.STEP_TIME else _bytes,
        unmodelled=tuple(left),
        without=without,
        facts=() if grown is None else (grown,),
    )


def _bytes(value: float) -> str:
    return format_bytes(round(value))
