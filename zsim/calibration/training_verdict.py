"""Compare predicted training runs with published ones: errors by file and by hardware."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from zsim.calibration.csv_rows import Unmodelled
from zsim.calibration.network_verdict import Errors, errors_of
from zsim.calibration.published import Published

WORST = 5
"""Number of listed rows with the largest errors."""


class Quantity(StrEnum):
    """Compared quantity."""

    STEP_TIME = "step time"
    """Seconds of an optimizer step."""
    MEMORY = "peak memory"
    """Bytes that a rank reserves, or allocates, whichever was published."""


TIME = Quantity.STEP_TIME


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """A published value in seconds or bytes, and its prediction."""

    run: Published
    published: float
    predicted: float

    @property
    def off(self) -> float:
        """Relative error of the prediction; negative if it is too small."""
        return self.predicted / self.published - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingVerdict:
    """Errors of the predictions for one file.

    Attributes:
        rows: number of rows with the quantity, and of rows without a result if these are included;
            modelled or not.
        without: number of modelled rows without a result.
        all, judged, fitted: errors of all modelled rows, of those in sweeps that judge, and of the
            others, which may have been used in a fit; None if there are none.
        by_hardware: errors of the rows that judge, by hardware.
        by_part, by_extent: the same by part of the file, if it has several, and by extent.
        steady: errors of the rows that judge and do not stall; None if no row stalls.
        steady_by_part: the same by part and extent.
        stalled: line numbers of all rows that stall.
        worst: the rows with the largest errors, the largest first.
        comparisons: all modelled rows with a result.
        unmodelled: unmodelled rows with the reason.
        whole: True if every row judges, and none was used in a fit.
    """

    file: str
    quantity: Quantity
    rows: int
    without: int
    all: Errors | None
    judged: Errors | None
    fitted: Errors | None
    by_hardware: Mapping[str, Errors]
    by_part: Mapping[str, Errors]
    by_extent: Mapping[str, Errors]
    worst: tuple[PredictedRun, ...]
    comparisons: tuple[PredictedRun, ...]
    unmodelled: tuple[Unmodelled, ...]
    whole: bool = False
    steady: Errors | None = None
    steady_by_part: Mapping[str, Errors] = field(default_factory=dict[str, Errors])
    stalled: tuple[int, ...] = ()

    @property
    def modelled(self) -> int:
        """Number of modelled rows."""
        return len(self.comparisons) + self.without


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
) -> TrainingVerdict:
    """Compare `runs` of `file` with their forecasts; with `whole`, every row judges.

    A forecast may be a string, the reason why there is none; it is None if the run is not
    modelled.
    """
    found: list[PredictedRun] = []
    left: list[Unmodelled] = []
    without = 0
    for run, forecast in zip(runs, forecasts, strict=True):
        value = published(run, quantity)
        refusal = "" if run.failed else run.refusal
        if run.reason or refusal or isinstance(forecast, str):
            reason = run.reason or refusal or str(forecast)
            left.append(Unmodelled(file=file, row=run.line, reason=reason))
        elif run.failed:
            without += 1
        elif value is not None and forecast is not None:
            given = predicted(run, quantity, forecast)
            found.append(PredictedRun(run=run, published=value, predicted=given))
    judges = [each for each in found if whole or each.run.judged]
    stalled = tuple(run.line for run in runs if run.stalls) if quantity is TIME else ()
    steady = [each for each in judges if stalled and not each.run.stalls]
    return TrainingVerdict(
        file=file,
        quantity=quantity,
        rows=len(found) + len(left) + without,
        without=without,
        all=_errors(found),
        judged=_errors(judges),
        fitted=_errors(each for each in found if each not in judges),
        by_hardware=_errors_by(judges, lambda each: (each.run.hardware,)),
        by_part=_errors_by(judges, lambda each: (each.run.part,)),
        by_extent=_errors_by(judges, lambda each: (each.run.extent,)),
        worst=tuple(sorted(found, key=lambda each: -abs(each.off))[:WORST]),
        comparisons=tuple(found),
        unmodelled=tuple(left),
        whole=whole,
        steady=_errors(steady),
        steady_by_part=_errors_by(steady, lambda each: (each.run.part, each.run.extent)),
        stalled=stalled,
    )


def _errors(found: Iterable[PredictedRun]) -> Errors | None:
    values = [abs(each.off) for each in found]
    return errors_of(values) if values else None


def _errors_by(
    found: Iterable[PredictedRun], names: Callable[[PredictedRun], Sequence[str]]
) -> dict[str, Errors]:
    """Return errors by name; skip runs without a name."""
    by_name: defaultdict[str, list[PredictedRun]] = defaultdict(list)
    for each in found:
        for name in filter(None, names(each)):
            by_name[name].append(each)
    return {
        word: errors_of([abs(each.off) for each in some]) for word, some in sorted(by_name.items())
    }
