"""Compare predictions with published measurements: errors by file, by hardware and by size."""

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
"""Size classes with stored errors, and their names in a profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedMeasurement:
    """A measurement and its prediction in seconds."""

    measurement: Measurement
    predicted_s: float

    @property
    def error(self) -> float:
        """Absolute error of the prediction, as a fraction of the measured time."""
        return abs(self.predicted_s / self.measurement.seconds - 1)


def size_class(size_bytes: int) -> str:
    """Return the size class, one of three, of a message."""
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
    """Errors of `rows` predictions, as fractions of the measured values."""

    rows: int
    median: float
    mean: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkVerdict:
    """Errors of the predictions for one file.

    Attributes:
        rows: number of rows, modelled or not.
        errors: errors of all modelled rows; None if there are none.
        by_class: the same by (hardware, size class).
        unmodelled: unmodelled rows with the reason.
        in_band: fraction of predictions inside the published band; None without bands.
        covered: number of published bands across nodes that the predicted band of the cluster's
            fabric covers, and number of all such bands.
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
    """Predict `rows`, each with the profile of its GPU; `left` are the unreadable rows."""
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
    """Return median, mean and 90th percentile of `errors`, which must not be empty."""
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
    """Return True if the predicted band of the fabric contains the published band of `row`."""
    assert row.band is not None
    fastest_s, slowest_s = (
        judged(replace(profiles, shared=each, systems={}), [row])[0].predicted_s
        for each in band(profiles, row.system)
    )
    return fastest_s <= row.band[0] and row.band[1] <= slowest_s
