"""`zsim validate training` and `memory`: predicted runs of training beside published ones."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from zsim.api.forecast import forecasts
from zsim.calibration.memory_fit import ABOVE, NEAR, Fit
from zsim.calibration.memory_fit import fit as fit_of
from zsim.calibration.published import Published
from zsim.calibration.validate import Errors
from zsim.calibration.verdict import Comparison, Quantity, Verdict, published, verdict
from zsim.cli.answer import print_json
from zsim.cli.errors import errors_cells, errors_object
from zsim.cli.measured import not_read, published_runs
from zsim.files.picture import need_format, write_picture
from zsim.files.written import answer_before, unwritten
from zsim.mistake import MistakeError
from zsim.report.svg.scatter import scatter
from zsim.units import format_bytes, format_seconds


def validate_training(
    folder: Path, quantity: Quantity, *, as_json: bool, picture: Path | None
) -> None:
    """Print how well `quantity` is predicted of the runs in `folder`.

    Raises:
        MistakeError: there is nothing to read, or no picture can be made.
        UnwrittenError: the picture cannot be written, or there is nothing to draw.
    """
    if picture is not None:
        need_format("--picture", picture)
    verdicts: list[Verdict] = []
    fits: dict[str, Fit] = {}
    for name, runs in published_runs(folder).items():
        verdict, fit = judged(name, quantity, runs)
        if verdict is not None:
            verdicts.append(verdict)
        if fit is not None:
            fits[name] = fit
    if not verdicts:
        raise MistakeError(f"{folder}: no row has a {quantity}")

    def draw() -> None:
        if picture is not None:
            drawn = [each for each in verdicts if each.comparisons]
            if not drawn:
                raise unwritten(picture, "no row is modelled")
            write_picture("--picture", picture, scatter(drawn, f"{quantity}: predicted, published"))

    with answer_before(draw):
        if as_json:
            files = {each.file: verdict_object(each) for each in verdicts}
            for name, fit in fits.items():
                files[name]["fit"] = fit_object(fit)
            print_json({"files": files, "not_read": not_read(folder)})
        else:
            print_verdicts(verdicts)
            for fit in fits.values():
                print_fit(fit)
            if unread := not_read(folder):
                print(f"not read, of a form that is not known: {', '.join(unread)}")


def judged(
    file: str, quantity: Quantity, runs: Sequence[Published]
) -> tuple[Verdict | None, Fit | None]:
    """The verdict on `runs` of `file`, None if no row has the quantity; with memory, what fits."""
    if not any(published(run, quantity) is not None for run in runs):
        return None, None
    memory = quantity is Quantity.MEMORY
    asked = [
        run
        for run in runs
        if run.reason or published(run, quantity) is not None or (memory and run.failed)
    ]
    found = forecasts([run.ways for run in asked], quantity)
    return verdict(file, quantity, asked, found), fit_of(file, asked, found) if memory else None


def fit_object(found: Fit) -> dict[str, object]:
    """What `--json` says of runs that fit, and of those that ended without a result."""
    return {
        "not_begun": found.not_begun,
        "without_result": found.without,
        "predicted_not_to_fit": found.refused,
        "with_result": found.results,
        "predicted_far_above_limit": len(found.wrong),
        "rows_far_above_limit": [run.line for run in found.wrong],
    }


def print_fit(found: Fit) -> None:
    """The same in a line."""
    refused = found.refused / found.without if found.without else 1.0
    wrong = len(found.wrong) / found.results if found.results else 0.0
    if found.not_begun:
        print(f"{found.file}: the trainer begins no run of {found.not_begun} rows without a result")
    print(
        f"{found.file}: of {found.without} rows without a result that no successful row dominates "
        f"{found.refused} ({refused:.1%}) are predicted above the limit or within {NEAR:.0%} of "
        f"it; of {found.results} with one {len(found.wrong)} ({wrong:.1%}) are predicted more than "
        f"{ABOVE:.0%} above it"
    )


def verdict_object(found: Verdict) -> dict[str, object]:
    """A file of `zsim validate --json`."""
    return {
        "rows": found.rows,
        "modelled": found.modelled,
        **_object(found.all),
        "judged": _object(found.judged, count=True),
        "fitted": _object(found.fitted, count=True),
        "hardware": {name: _object(each, count=True) for name, each in found.by_hardware.items()},
        "parts": {name: _object(each, count=True) for name, each in found.by_part.items()},
        "worst": [
            {
                "row": each.run.line,
                "judged": each.run.judged,
                "published": each.published,
                "predicted": each.predicted,
                "error": each.off,
            }
            for each in found.worst
        ],
        "unmodelled": [{"row": each.row, "reason": each.reason} for each in found.unmodelled],
    }


def _object(errors: Errors | None, *, count: bool = False) -> dict[str, object]:
    rows: dict[str, object] = {"modelled": errors.rows if errors else 0} if count else {}
    return rows | errors_object(errors)


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """A table of errors, then for each file its worst rows and those that are not modelled."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("file", "rows of", "hardware"):
        table.add_column(name, no_wrap=True)
    for name in ("rows", "median", "mean", "90 %"):
        table.add_column(name, justify="right")
    for found in verdicts:
        table.add_row(found.file, "all sweeps", "", *errors_cells(found.all))
        if not found.whole:
            table.add_row("", "sweeps that may be fitted", "", *errors_cells(found.fitted))
            table.add_row("", "sweeps that judge", "all", *errors_cells(found.judged))
        for name, errors in (*found.by_hardware.items(), *found.by_part.items()):
            table.add_row("", "", name, *errors_cells(errors))
    Console(width=120, highlight=False).print(table)
    for found in verdicts:
        print(f"{found.file}: {found.modelled} of {found.rows} rows are modelled")
        for reason, count in Counter(each.reason for each in found.unmodelled).items():
            lines = ", ".join(str(each.row) for each in found.unmodelled if each.reason == reason)
            print(f"  not {'line' if count == 1 else 'lines'} {lines}: {reason}")
        if found.worst:
            print("  furthest off:")
        for each in found.worst:
            print(f"    {_line(found, each)}")


def _line(found: Verdict, each: Comparison) -> str:
    run = each.run
    if found.quantity is Quantity.STEP_TIME:
        given, said = format_seconds(each.published), format_seconds(each.predicted)
    else:
        given, said = format_bytes(round(each.published)), format_bytes(round(each.predicted))
    words = [run.hardware, run.model, f"{run.sequence_length} tokens"]
    if not found.whole:
        words.append("judges" if run.judged else "may be fitted")
    where = f"line {run.line} ({', '.join(words)})"
    return f"{where}: published {given}, predicted {said}, {each.off:+.1%}"
