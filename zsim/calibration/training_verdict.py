"""Predicted runs of training beside published ones, as a verdict on each file."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from zsim.calibration.error_growth import growth
from zsim.calibration.published import Published
from zsim.calibration.verdict import Verdict, VerdictRow
from zsim.units import format_bytes, format_seconds


class Quantity(StrEnum):
    """Compared quantity."""

    STEP_TIME = "step time"
    """Seconds of an optimizer step."""
    MEMORY = "peak memory"
    """Bytes that a rank reserves, or allocates, whichever was published."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast:
    """Prediction for a run.

    Attributes:
        usable_bytes: memory that a rank may reserve: that of its GPU minus that of CUDA and NCCL.
        fits: True if every rank has the memory that it reserves.
        way: index of the predicted scenario among those of the run.
        kept_bytes: lower bound of the peak of a rank without the buffers of collectives.
    """

    step_time_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    usable_bytes: int
    fits: bool
    way: int = 0
    kept_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """Bytes that a rank would reserve; at least its allocations if it runs out of memory."""
        if self.fits:
            return self.peak_reserved_bytes
        return max(self.peak_reserved_bytes, self.peak_allocated_bytes)


def published(run: Published, quantity: Quantity) -> float | None:
    """Return the published value of `run` in seconds or bytes; None if there is none."""
    return run.step_time_s if quantity is Quantity.STEP_TIME else run.peak_bytes


def predicted(run: Published, quantity: Quantity, forecast: RunForecast) -> float:
    """Return the predicted value of `run` in seconds or bytes."""
    if quantity is Quantity.STEP_TIME:
        return forecast.step_time_s
    return forecast.needed_bytes if run.reserved else forecast.peak_allocated_bytes


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
                    way=forecast.way,
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
