"""Predictions beside published measurements: errors by file, by hardware and by size."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles

from zsim.calibration.collective_rows import Measurement
from zsim.calibration.csv_rows import Unmodelled
from zsim.cluster.profile.files import Profiles
from zsim.network.band import band
from zsim.network.tuner import alone_s

MEDIUM_BYTES, LARGE_BYTES = 64 * 2**10, 16 * 2**20
SIZE_CLASSES = {"16 MiB and more": "large", "64 KiB to 16 MiB": "medium"}
"""Classes of size for which errors are kept, with their name in a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedMeasurement:
    """A measurement and what is predicted for it, in seconds."""

    measurement: Measurement
    predicted_s: float

    @property
    def error(self) -> float:
        """Error of the prediction, as a fraction of the measured time."""
        return abs(self.predicted_s / self.measurement.seconds - 1)


def size_class(size_bytes: int) -> str:
    """Return the class, of three, in which errors of this size are listed."""
    if size_bytes < MEDIUM_BYTES:
        return "below 64 KiB"
    return "64 KiB to 16 MiB" if size_bytes < LARGE_BYTES else "16 MiB and more"


def judged(profiles: Profiles, rows: Collection[Measurement]) -> list[JudgedMeasurement]:
    """Return predictions for `rows`, which are of the GPU of `profiles`."""
    return [
        JudgedMeasurement(
            measurement=row,
            predicted_s=alone_s(
                profiles.of(row.system),
                row.collective,
                row.size_bytes,
                row.shape,
                links=row.links,
            ),
        )
        for row in rows
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of `rows` predictions, as fractions of what was measured."""

    rows: int
    median: float
    mean: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkVerdict:
    """Errors of the predictions for one file.

    Attributes:
        rows: rows of the file, modelled or not.
        errors: of all that are modelled; None if none is.
        by_class: the same by (hardware, class of size).
        unmodelled: the rows that are not, each with the reason.
        in_band: share of predictions inside the published band, where there is one.
        covered: of published bands across nodes, how many the predicted band of the cluster's
            fabric covers, and how many there are.
    """

    file: str
    rows: int
    errors: Errors | None
    by_class: Mapping[tuple[str, str], Errors]
    unmodelled: tuple[Unmodelled, ...]
    in_band: float | None
    covered: tuple[int, int] = (0, 0)


def verdict(
    file: str,
    rows: Sequence[Measurement],
    left: Sequence[Unmodelled],
    profiles: Mapping[str, Profiles],
) -> NetworkVerdict:
    """Predict `rows`, each with the profile of its kind of GPU; `left` were not readable."""
    found: list[JudgedMeasurement] = []
    unmodelled = list(left)
    for row in rows:
        if row.gpu in profiles:
            found += judged(profiles[row.gpu], [row])
        else:
            unmodelled.append(Unmodelled(file=file, row=row.row, reason=f"no profile of {row.gpu}"))
    by_class: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for each in found:
        row = each.measurement
        by_class[row.gpu, size_class(row.size_bytes)].append(each.error)
    return NetworkVerdict(
        file=file,
        rows=len(rows) + len(left),
        errors=errors_of([each.error for each in found]) if found else None,
        by_class={key: errors_of(errors) for key, errors in sorted(by_class.items())},
        unmodelled=tuple(unmodelled),
        in_band=_in_band(found),
        covered=_covered(rows, profiles),
    )


def errors_of(errors: Sequence[float]) -> Errors:
    """Return median, mean and 90th percentile of `errors`, of which there is at least one."""
    p90 = quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else errors[0]
    return Errors(rows=len(errors), median=median(errors), mean=fmean(errors), p90=p90)


def _in_band(found: Sequence[JudgedMeasurement]) -> float | None:
    inside = [
        low <= each.predicted_s <= high
        for each in found
        if each.measurement.band is not None
        for low, high in (each.measurement.band,)
    ]
    return sum(inside) / len(inside) if inside else None


def _covered(rows: Sequence[Measurement], profiles: Mapping[str, Profiles]) -> tuple[int, int]:
    crossing = [row for row in rows if row.band is not None and row.shape.nodes > 1]
    known = [row for row in crossing if row.gpu in profiles]
    return sum(_covers(profiles[row.gpu], row) for row in known), len(known)


def _covers(profiles: Profiles, row: Measurement) -> bool:
    """Return whether the fastest and the slowest that its fabric may be hold what `row` says."""
    assert row.band is not None
    fastest_s, slowest_s = (
        judged(replace(profiles, shared=each, systems={}), [row])[0].predicted_s
        for each in band(profiles, row.system)
    )
    return fastest_s <= row.band[0] and row.band[1] <= slowest_s
