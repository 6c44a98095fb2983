"""Text and JSON of prediction errors, shared by all `zsim validate` commands."""

from collections.abc import Iterable

from zsim.calibration.csv_rows import Unmodelled
from zsim.calibration.network_verdict import Errors


def errors_object(errors: Errors | None) -> dict[str, object]:
    """Return median, mean and 90th percentile for `--json`; null if no row is modelled."""
    return {
        "median_abs_error": errors.median if errors else None,
        "mean_abs_error": errors.mean if errors else None,
        "p90_abs_error": errors.p90 if errors else None,
    }


def errors_cells(errors: Errors | None) -> tuple[str, ...]:
    """Return rows, median, mean and 90th percentile as cells of a table."""
    if errors is None:
        return ("0", "", "", "")
    values = (errors.median, errors.mean, errors.p90)
    return (str(errors.rows), *(f"{value:.1%}" for value in values))


def unmodelled_objects(found: Iterable[Unmodelled]) -> list[dict[str, object]]:
    """Return the unmodelled rows and the reasons for `--json`."""
    return [{"row": each.row, "reason": each.reason} for each in found]


def unmodelled_lines(found: Iterable[Unmodelled]) -> list[str]:
    """Return the reasons for unmodelled rows, each reason once with its rows."""
    by_reason: dict[str, list[str]] = {}
    for each in found:
        by_reason.setdefault(each.reason, []).append(str(each.row))
    return [
        f"  not {'line' if len(rows) == 1 else 'lines'} {', '.join(rows)}: {reason}"
        for reason, rows in by_reason.items()
    ]
