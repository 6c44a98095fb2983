"""Compare predicted times of collectives with published measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from zsim.api.answer import Answer
from zsim.api.answer_text import table_text
from zsim.api.prediction_errors import (
    errors_cells,
    errors_object,
    unmodelled_lines,
    unmodelled_objects,
)
from zsim.calibration.network_verdict import SIZE_CLASSES, NetworkVerdict, verdict
from zsim.cluster.profile.files import Profiles
from zsim.files.installed import network_profiles
from zsim.files.measurements import measurements

HeldOut = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Median errors by hardware and size class, of rows fitted and of groups held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkValidation(Answer):
    """Validation of the profiles in the package against tables of measurements.

    Attributes:
        verdicts: errors of each table, by hardware and size class.
        held_out: median errors by hardware and size class, of all fitted rows and of the groups
            held out.
    """

    verdicts: tuple[NetworkVerdict, ...]
    held_out: HeldOut

    def text(self) -> str:
        """Return a table of errors, unmodelled rows, and errors of held-out rows."""
        return f"{network_text(self.verdicts)}\n{held_out_text(self.held_out)}"

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate network --json` prints."""
        files = {each.file: network_object(each) for each in self.verdicts}
        return {"files": files, "held_out": self.held_out}


def validate_network(folder: str | PathLike[str]) -> NetworkValidation:
    """Return the errors of the packaged profiles on the tables of collectives in `folder`.

    Raises:
        MistakeError: there is nothing to read.
    """
    profiles = network_profiles()
    tables = measurements(Path(folder))
    verdicts = [verdict(name, found, left, profiles) for name, (found, left) in tables.items()]
    return NetworkValidation(verdicts=tuple(verdicts), held_out=held_out_object(profiles))


def network_text(verdicts: Sequence[NetworkVerdict]) -> str:
    """Return a table of errors, and the rows that zsim does not model."""
    rows: list[tuple[str, ...]] = []
    for found in verdicts:
        if found.errors is not None:
            rows.append((found.file, "all", "all", *errors_cells(found.errors)))
        for (gpu, size), errors in found.by_class.items():
            rows.append(("", gpu, size, *errors_cells(errors)))
    columns = ("file", "hardware", "size", "rows", "median", "mean", "90 %")
    lines = [table_text(columns, rows, words=range(3))]
    for found in verdicts:
        modelled = found.errors.rows if found.errors else 0
        lines.append(f"{found.file}: {modelled} of {found.rows} rows are modelled")
        lines += unmodelled_lines(found.unmodelled)
        if found.in_band is not None:
            inside = f"{found.in_band:.0%} of the predictions"
            lines.append(f"  {inside} are inside the published band")
        covered, bands = found.covered
        if bands:
            lines.append(f"  the predicted band covers {covered} of {bands} that were published")
    return "\n".join(lines)


def network_object(found: NetworkVerdict) -> dict[str, object]:
    """Return the `--json` object of a table of collectives."""
    errors = found.errors
    result: dict[str, object] = {
        "rows": found.rows,
        "modelled": errors.rows if errors else 0,
        **errors_object(errors),
        "hardware": {},
        "unmodelled": unmodelled_objects(found.unmodelled),
    }
    hardware: dict[str, dict[str, object]] = {}
    for (gpu, size), each in found.by_class.items():
        hardware.setdefault(gpu, {})[size] = {
            "modelled": each.rows,
            **errors_object(each),
        }
    result["hardware"] = hardware
    if found.in_band is not None:
        result["inside_published_band"] = found.in_band
    covered, bands = found.covered
    if bands:
        result["published_bands"] = {"published": bands, "covered": covered}
    return result


def held_out_text(held_out: HeldOut) -> str:
    """Return the errors of the groups held out when the packaged profiles were fitted."""
    lines = [
        "each (file, hardware, collective, size of group) held out once when the profiles were",
        "fitted, and predicted by a fit without it; median errors:",
    ]
    for gpu, sizes in held_out.items():
        for size, medians in sizes.items():
            fitted, of_held_out = medians.values()
            of_rows = f"{of_held_out:6.1%} held out, {fitted:5.1%} of all rows fitted"
            lines.append(f"  {gpu:6} {size:17} {of_rows}")
    return "\n".join(lines)


def held_out_object(profiles: Mapping[str, Profiles]) -> HeldOut:
    """Return median errors of fitted rows and of held-out groups, by hardware and size class."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for gpu, each in sorted(profiles.items()):
        for size, name in SIZE_CLASSES.items():
            held_out = each.errors.get(f"held_out_{name}")
            if held_out is not None:
                found.setdefault(gpu, {})[size] = {
                    "fitted_median_abs_error": each.errors[f"fitted_{name}"],
                    "held_out_median_abs_error": held_out,
                }
    return found
