"""Errors of predictions, as every `zsim validate` prints them."""

from zsim.calibration.network_verdict import Errors


def errors_object(errors: Errors | None) -> dict[str, object]:
    """Median, mean and 90th percentile for `--json`; null where no row is modelled."""
    return {
        "median_abs_error": errors.median if errors else None,
        "mean_abs_error": errors.mean if errors else None,
        "p90_abs_error": errors.p90 if errors else None,
    }


def errors_cells(errors: Errors | None) -> tuple[str, ...]:
    """Rows, median, mean and 90th percentile, as columns of a table."""
    if errors is None:
        return ("0", "", "", "")
    values = (errors.median, errors.mean, errors.p90)
    return (str(errors.rows), *(f"{value:.1%}" for value in values))
