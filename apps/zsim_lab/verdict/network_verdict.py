"""Compare predictions with published measurements: errors by file, by hardware and by size."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zsim.cluster.profile.files import Profiles
from zsim.network.band import band
from zsim.network.tuner import alone_s
from zsim.units import format_bytes, format_seconds
from zsim_lab.rows.collective_rows import Measurement
from zsim_lab.rows.csv_rows import Unmodelled
from zsim_lab.verdict.verdict import Fact, Verdict, VerdictRow

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


def row_of(each: JudgedMeasurement, groups: Mapping[str, str]) -> VerdictRow:
    """Return a measurement with its prediction as a row of a verdict, in these groups."""
    row = each.measurement
    nodes = f" on {row.shape.nodes} nodes" if row.shape.nodes > 1 else ""
    return VerdictRow(
        place=row.row,
        name=f"line {row.row} ({row.gpu}, {row.collective} of {row.shape.ranks} ranks{nodes}, "
        f"{format_bytes(row.size_bytes)})",
        published=row.seconds,
        predicted=each.predicted_s,
        groups=groups,
        source=row,
    )


def verdict(
    file: str,
    rows: Sequence[Measurement],
    left: Sequence[Unmodelled],
    profiles: Mapping[str, Profiles],
) -> Verdict:
    """Predict `rows`, each with the profile of its kind of GPU; `left` were not readable."""
    found: list[JudgedMeasurement] = []
    unmodelled: list[tuple[int | str, str]] = [(each.row, each.reason) for each in left]
    for row in rows:
        if row.gpu in profiles:
            found += judged(profiles[row.gpu], [row])
        else:
            unmodelled.append((row.row, f"no profile of {row.gpu}"))
    return Verdict(
        name=file,
        quantity="time of a collective",
        rows=tuple(
            row_of(each, {"hardware": f"{row.gpu}, {size_class(row.size_bytes)}"})
            for each in found
            for row in (each.measurement,)
        ),
        shown=format_seconds,
        unmodelled=tuple(unmodelled),
        facts=tuple(_bands(rows, found, profiles)),
    )


def _bands(
    rows: Sequence[Measurement],
    found: Sequence[JudgedMeasurement],
    profiles: Mapping[str, Profiles],
) -> Iterator[Fact]:
    """Yield the share of predictions in published bands, and the published bands covered."""
    inside = _in_band(found)
    if inside is not None:
        line = f"{inside:.0%} of the predictions are inside the published band"
        yield Fact(name="inside_published_band", value=inside, lines=(line,))
    covered, bands = _covered(rows, profiles)
    if bands:
        line = f"the predicted band covers {covered} of {bands} that were published"
        value = {"published": bands, "covered": covered}
        yield Fact(name="published_bands", value=value, lines=(line,))


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
