"""`zsim validate network`: what is predicted beside what others measured."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from zsim.calibration.measured import Measurement
from zsim.calibration.table import Unmodelled
from zsim.calibration.validate import SIZE_CLASSES, Verdict, verdict
from zsim.cli.answer import print_json
from zsim.cli.errors import errors_cells, errors_object
from zsim.cli.measured import measurements
from zsim.cluster.profile.files import Profiles
from zsim.files.installed import network_profiles


def validate_network(folder: Path, *, as_json: bool) -> None:
    """Print how well the profiles that ship predict the tables in `folder`.

    Raises:
        MistakeError: there is nothing to read.
    """
    profiles = network_profiles()
    verdicts = network_verdicts(measurements(folder), profiles)
    if as_json:
        files = {each.file: network_object(each) for each in verdicts}
        print_json({"files": files, "held_out": _held_out(profiles)})
    else:
        print_network(verdicts)
        _print_held_out(profiles)


def network_verdicts(
    tables: Mapping[str, tuple[Sequence[Measurement], Sequence[Unmodelled]]],
    profiles: Mapping[str, Profiles],
) -> list[Verdict]:
    """Judge every table of collectives."""
    return [verdict(name, found, left, profiles) for name, (found, left) in tables.items()]


def network_object(found: Verdict) -> dict[str, object]:
    """Return what `--json` says of a table of collectives."""
    errors = found.errors
    result: dict[str, object] = {
        "rows": found.rows,
        "modelled": errors.rows if errors else 0,
        **errors_object(errors),
        "hardware": {},
        "unmodelled": [{"row": each.row, "reason": each.reason} for each in found.unmodelled],
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
    return result


def print_network(verdicts: Sequence[Verdict]) -> None:
    """Print the errors of tables of collectives, and the rows that are not modelled."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("file", "hardware", "size"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "median", "mean", "90 %"):
        table.add_column(name, justify="right")
    for found in verdicts:
        if found.errors is not None:
            table.add_row(found.file, "all", "all", *errors_cells(found.errors))
        for (gpu, size), errors in found.by_class.items():
            table.add_row("", gpu, size, *errors_cells(errors))
    Console(width=100, highlight=False).print(table)
    for found in verdicts:
        modelled = found.errors.rows if found.errors else 0
        print(f"{found.file}: {modelled} of {found.rows} rows are modelled")
        for reason, count in Counter(each.reason for each in found.unmodelled).items():
            rows = [str(each.row) for each in found.unmodelled if each.reason == reason]
            print(f"  not {'line' if count == 1 else 'lines'} {', '.join(rows)}: {reason}")
        if found.in_band is not None:
            print(f"  {found.in_band:.0%} of the predictions are inside the published band")


def _held_out(profiles: Mapping[str, Profiles]) -> dict[str, dict[str, dict[str, float]]]:
    """By hardware and class of size: median errors on rows fitted, and on groups held out."""
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


def _print_held_out(profiles: Mapping[str, Profiles]) -> None:
    print("each (file, hardware, collective, size of group) held out once when the profiles were")
    print("fitted, and predicted by a fit without it; median errors:")
    for gpu, sizes in _held_out(profiles).items():
        for size, errors in sizes.items():
            fitted, held_out = errors.values()
            print(f"  {gpu:6} {size:17} {held_out:6.1%} held out, {fitted:5.1%} of all rows fitted")
