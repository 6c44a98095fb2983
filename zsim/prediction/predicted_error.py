"""Error of a prediction: an interval of the step time, and the closest published measurements."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, hypot, log
from typing import Any, Protocol

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.foreign_profile import efficiency_words, foreign_words
from zsim.cluster.profile.host_launch import EAGER
from zsim.prediction.closest_runs import SHOWN, closest, closest_of
from zsim.prediction.error_columns import changed, peak_columns, ratio_columns, time_columns
from zsim.prediction.error_rule import COMPARABLE, ErrorInterval, shipped_rules
from zsim.prediction.evidence import JudgedRun, judged_runs
from zsim.prediction.run_features import RunFeatures, features_of

PUBLISHED = (
    "unknown: times come from {gpu} rates, memory bandwidth and link speeds of {cluster} as "
    "published, not from measurements; real steps are mostly longer"
)
NETWORK = (
    "unknown: times of kernels come from {gpu} rates and memory bandwidth as published; "
    "collectives have the constants of a network profile (zsim validate network)"
)
MEASURED = "unknown: times were measured with zsim measure, and no run of training was compared"
LAUNCHES = "; kernels are launched as fast as on the host of an A100"
LINKS = "; link speeds are as published"


class StatedError(Protocol):
    """Error of a step time in a trace."""

    @property
    def low(self) -> float:
        """Lower bound, as a factor of the prediction."""
        ...

    @property
    def high(self) -> float:
        """Upper bound, as a factor of the prediction."""
        ...

    @property
    def features(self) -> str:
        """Features of the run as JSON."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedError:
    """Error of a predicted step time.

    Attributes:
        text: the error in one line.
        interval: interval of the step time; None if no published run is comparable.
        features: features of the run; None if there is no interval.
    """

    text: str
    interval: ErrorInterval | None = None
    features: RunFeatures | None = None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of the step time as factors of the prediction; None if unknown."""
        return None if self.interval is None else self.interval.of(1.0)

    @property
    def features_text(self) -> str:
        """Features as JSON, from which the error of a ratio is computed; empty if unknown."""
        return "" if self.features is None else json.dumps(asdict(self.features))


def step_error(job: Job, aside: Sequence[str] = ()) -> PredictedError:
    """Return the error of the simulated step time of `job`; unknown if `aside` names extras."""
    cluster = job.cluster
    if cluster.gpu.measured is not None:
        return PredictedError(text=_measured(cluster))
    foreign = foreign_words(cluster)
    if cluster.gpu.kernels is None:
        sentence = PUBLISHED if cluster.network is None else NETWORK
        text = sentence.format(gpu=cluster.gpu.name, cluster=cluster.name)
        text += LAUNCHES if cluster.gpu.launch == EAGER else ""
        return PredictedError(text=f"{text}; {foreign}" if foreign else text)
    asked = features_of(job)
    if foreign:
        scaled = efficiency_words(cluster.gpu.kernels.gpu, cluster.gpu.name)
        return PredictedError(text="; ".join(filter(None, (f"unknown: {foreign}", scaled))))
    if isinstance(asked, str):
        return PredictedError(text=f"unknown: no published run is comparable: {asked}")
    if aside:
        return PredictedError(text=f"unknown: no published run has {' or '.join(aside)}")
    found = error_of(asked, judged_runs())
    return replace(found, text=f"{found.text}{_links(cluster)}")


def _links(cluster: Cluster) -> str:
    """Return a note on network constants that differ from published runs'; empty if none."""
    if cluster.network is None:
        return LINKS
    system = cluster.network.name.partition("/")[2]
    return f"; collectives have constants of one system, {system}" if system else ""


def _measured(cluster: Cluster) -> str:
    times = cluster.gpu.measured
    assert times is not None
    without = f"; not measured: {', '.join(times.missing)}" if times.missing else ""
    hurried = f"; seconds were short: {'; '.join(times.hurried)}" if times.hurried else ""
    source = dict(cluster.cites).get("measured", "measured on ranks like these")
    return f"{MEASURED} ({source}){without}{hurried}"


def error_of(asked: RunFeatures, runs: Sequence[JudgedRun]) -> PredictedError:
    """Return the error of a step time by the packaged rule, with the closest published run."""
    interval = shipped_rules().time.interval(time_columns(asked))
    text = f"{interval.text()} ({COMPARABLE}){_measured_by(asked, runs)}"
    return PredictedError(text=text, interval=interval, features=asked)


def peak_error(job: Job) -> PredictedError:
    """Return the error of the predicted peak of device memory of `job`."""
    asked = features_of(job)
    if isinstance(asked, str):
        return PredictedError(text=f"unknown: no published run is comparable: {asked}")
    interval = shipped_rules().peak.interval(peak_columns(asked))
    runs = [run for run in judged_runs() if run.peak_bytes is not None]
    text = f"peak {interval.text()} ({COMPARABLE}){_measured_by(asked, runs)}"
    return PredictedError(text=text, interval=interval, features=asked)


def _measured_by(asked: RunFeatures, runs: Sequence[JudgedRun]) -> str:
    near = closest_of(asked, runs)
    return "" if near is None else f"; closest measured: {near.text()}"


def ratio_half_width(one: StatedError, other: StatedError) -> float:
    """Return the half-width of the error of the ratio of two step times, as a fraction.

    90 % of comparable pairs are within it. Runs of one model, runtime and GPU share most of their
    errors, even if they differ in a choice that is not a feature. Errors of other pairs are
    combined as independent errors.
    """
    first, second = (RunFeatures(**features_object(each)) for each in (one, other))
    columns = ratio_columns(first, second)
    if columns is None:
        widths = (log(each.high / each.low) / 2 for each in (one, other))
        return exp(hypot(*widths)) - 1
    return shipped_rules().ratio.interval(columns).high - 1


def features_object(error: StatedError) -> dict[str, Any]:
    """Return the features of a run by name."""
    found: dict[str, Any] = json.loads(error.features)
    return found


def explained(error: StatedError | None, step_s: float) -> list[tuple[str, str]]:
    """Return the components of the error of a step time: name and line of each."""
    if error is None:
        return []
    run = RunFeatures(**features_object(error))
    rule, columns = shipped_rules().time, time_columns(run)
    parts = sorted(
        ((rule.weight(name) * value, name) for name, value in columns.items() if value),
        key=lambda each: -abs(each[0]),
    )
    low_s, high_s = ErrorInterval(error.low, error.high).of(step_s)
    lines = [
        ("interval", f"{low_s:.4g} to {high_s:.4g} s a step, predicted {step_s:.4g} s"),
        (
            "made of",
            f"±{rule.quantile * exp(rule.base):.1%} without any of these; "
            + ", ".join(f"{name} x {exp(weight):.2f}" for weight, name in parts),
        ),
    ]
    lines += [
        (
            f"closest {number}",
            f"{each.publication}: published {each.step_s:.4g} s, predicted "
            f"{each.predicted_step_s:.4g} s ({each.step_error:+.1%}); differs in "
            f"{', '.join(changed(run, each.features)) or 'size or trainer'}",
        )
        for number, each in enumerate(closest(run, judged_runs())[:SHOWN], start=1)
    ]
    return [*lines, ("coverage", "measured, not guaranteed: zsim validate error")]
