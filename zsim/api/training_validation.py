"""Compare predicted training runs with published ones: step times, or memory peaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from textwrap import wrap

from zsim.api.answer import Answer
from zsim.api.answer_text import table_text
from zsim.api.forecast import asked, forecasts
from zsim.api.prediction_errors import (
    errors_cells,
    errors_object,
    unmodelled_lines,
    unmodelled_objects,
)
from zsim.calibration.error_growth import ErrorGrowth, growth
from zsim.calibration.memory_fit import ABOVE, NEAR, MemoryFit
from zsim.calibration.memory_fit import fit as fit_of
from zsim.calibration.network_verdict import Errors
from zsim.calibration.published import Published
from zsim.calibration.stalls import SLOWER
from zsim.calibration.training_tables import TABLES
from zsim.calibration.training_verdict import (
    PredictedRun,
    Quantity,
    TrainingVerdict,
    published,
    verdict,
)
from zsim.files.measurements import not_read, published_runs
from zsim.files.picture import need_format, write_picture
from zsim.files.written import unwritten
from zsim.mistake import MistakeError
from zsim.report.svg.scatter import scatter
from zsim.units import format_bytes, format_seconds

__all__ = ["Quantity", "TrainingValidation", "validate_training"]


WIDTH = 120
"""Line width of a list of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingValidation(Answer):
    """Validation of step times or memory peaks against published runs.

    Attributes:
        quantity: step time or memory peak.
        verdicts: errors of each table that has the quantity.
        fits: for memory, accuracy of predicting which runs fit, by table.
        not_read: tables in the folder whose format is unknown.
    """

    quantity: Quantity
    verdicts: tuple[TrainingVerdict, ...]
    fits: Mapping[str, MemoryFit]
    not_read: tuple[str, ...]

    def text(self) -> str:
        """Return a table of errors, the worst rows of each file, and the unmodelled rows."""
        lines = [verdicts_text(self.verdicts), *map(fit_text, self.fits.values())]
        if self.not_read:
            lines.append(f"not read, of a form that is not known: {', '.join(self.not_read)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate --json` prints."""
        files = {each.file: verdict_object(each) for each in self.verdicts}
        for name, fit in self.fits.items():
            files[name]["fit"] = fit_object(fit)
        return {"files": files, "not_read": list(self.not_read)}

    def picture(self, path: str | PathLike[str]) -> None:
        """Draw predicted against published values to `path`: .svg, .png or .pdf.

        Raises:
            MistakeError: PNG and PDF need the extra `draw`.
            UnwrittenError: the file cannot be written, or there is nothing to draw.
        """
        need_format("picture", Path(path))
        drawn = [each for each in self.verdicts if each.comparisons]
        if not drawn:
            raise unwritten(Path(path), "no row is modelled")
        title = f"{self.quantity}: predicted, published"
        write_picture("picture", Path(path), scatter(drawn, title))


def validate_training(folder: str | PathLike[str], quantity: Quantity) -> TrainingValidation:
    """Predict `quantity` of the published runs in `folder` and return the errors.

    Raises:
        MistakeError: no row has the quantity.
    """
    verdicts: list[TrainingVerdict] = []
    fits: dict[str, MemoryFit] = {}
    for name, runs in published_runs(Path(folder)).items():
        verdict, fit = judged(name, quantity, runs)
        if verdict is not None:
            verdicts.append(verdict)
        if fit is not None:
            fits[name] = fit
    if not verdicts:
        raise MistakeError(f"{folder}: no row has a {quantity}")
    return TrainingValidation(
        quantity=quantity,
        verdicts=tuple(verdicts),
        fits=fits,
        not_read=tuple(not_read(Path(folder))),
    )


def judged(
    file: str, quantity: Quantity, runs: Sequence[Published]
) -> tuple[TrainingVerdict | None, MemoryFit | None]:
    """Return the verdict on `runs` (None if none has the quantity), and the fit for memory."""
    if not any(published(run, quantity) is not None for run in runs):
        return None, None
    memory = quantity is Quantity.MEMORY
    some = [
        run
        for run in runs
        if run.reason or published(run, quantity) is not None or (memory and run.failed)
    ]
    found = forecasts([asked(run, quantity) for run in some])
    whole = file in TABLES and TABLES[file].judges
    made = verdict(file, quantity, some, found, whole=whole)
    return made, fit_of(file, some, found) if memory else None


def fit_object(found: MemoryFit) -> dict[str, object]:
    """Return the `--json` object of runs that fit and of runs without a result."""
    return {
        "not_begun": found.not_begun,
        "without_result": found.without,
        "predicted_not_to_fit": found.refused,
        "with_result": found.results,
        "predicted_far_above_limit": len(found.wrong),
        "rows_far_above_limit": [run.line for run in found.wrong],
    }


def fit_text(found: MemoryFit) -> str:
    """Return the same as one line, and a second line of runs that the trainer refuses."""
    refused = found.refused / found.without if found.without else 1.0
    wrong = len(found.wrong) / found.results if found.results else 0.0
    text = (
        f"{found.file}: of {found.without} rows without a result that no successful row dominates "
        f"{found.refused} ({refused:.1%}) are predicted above the limit or within {NEAR:.0%} of "
        f"it; of {found.results} with one {len(found.wrong)} ({wrong:.1%}) are predicted more than "
        f"{ABOVE:.0%} above it"
    )
    if not found.not_begun:
        return text
    none = f"the trainer begins no run of {found.not_begun} rows without a result"
    return f"{found.file}: {none}\n{text}"


def verdict_object(found: TrainingVerdict) -> dict[str, object]:
    """Return the object of a file in `zsim validate --json`."""
    return {
        "rows": found.rows,
        "modelled": found.modelled,
        **_object(found.all),
        "judged": _object(found.judged, count=True),
        "fitted": _object(found.fitted, count=True),
        "hardware": {name: _object(each, count=True) for name, each in found.by_hardware.items()},
        "parts": {name: _object(each, count=True) for name, each in found.by_part.items()},
        "extents": {name: _object(each, count=True) for name, each in found.by_extent.items()},
        **_stalls_object(found),
        "worst": [
            {
                "row": each.run.line,
                "judged": found.whole or each.run.judged,
                "published": each.published,
                "predicted": each.predicted,
                "error": each.off,
            }
            for each in found.worst
        ],
        "growth_with_gpus": _growth_object(growth(found.comparisons)),
        "unmodelled": unmodelled_objects(found.unmodelled),
    }


def _stalls_object(found: TrainingVerdict) -> dict[str, object]:
    """Return rows that stall, and errors without them; empty if none stalls."""
    if not found.stalled:
        return {}
    parts = found.steady_by_part.items()
    return {
        "stalled_rows": list(found.stalled),
        "without_stalls": {
            **_object(found.steady, count=True),
            "parts": {name: _object(each, count=True) for name, each in parts},
        },
    }


def _growth_object(found: ErrorGrowth | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "settings": found.settings,
        "fewest_gpus": found.fewest,
        "most_gpus": found.most,
        "median": found.median,
        "furthest": found.furthest,
    }


def _growth_lines(found: ErrorGrowth | None) -> list[str]:
    if found is None:
        return []
    return [
        f"  from the fewest to the most GPUs ({found.fewest} to {found.most}) errors of "
        f"{found.settings} settings change by {found.median:+.1%} in the median, by "
        f"{found.furthest:+.1%} at most"
    ]


def _object(errors: Errors | None, *, count: bool = False) -> dict[str, object]:
    rows: dict[str, object] = {"modelled": errors.rows if errors else 0} if count else {}
    return rows | errors_object(errors)


def verdicts_text(verdicts: Sequence[TrainingVerdict]) -> str:
    """Return a table of errors, the worst rows of each file, and the unmodelled rows."""
    rows: list[tuple[str, ...]] = []
    for found in verdicts:
        rows.append((found.file, "all sweeps", "", *errors_cells(found.all)))
        if not found.whole:
            rows += [
                ("", "sweeps that may be fitted", "", *errors_cells(found.fitted)),
                ("", "sweeps that judge", "all", *errors_cells(found.judged)),
            ]
        told = (found.by_hardware, found.by_part, found.by_extent)
        for name, errors in (pair for each in told for pair in each.items()):
            rows.append(("", "", name, *errors_cells(errors)))
        steady = {"all": found.steady, **found.steady_by_part} if found.stalled else {}
        for number, (name, each) in enumerate(steady.items()):
            rows.append(("", "" if number else "of these, not stalled", name, *errors_cells(each)))
    columns = ("file", "rows of", "hardware", "rows", "median", "mean", "90 %")
    lines = [line for found in verdicts for line in _stalled_lines(found)]
    lines.append(table_text(columns, rows, words=range(3), width=None))
    for found in verdicts:
        lines.append(f"{found.file}: {found.modelled} of {found.rows} rows are modelled")
        lines += unmodelled_lines(found.unmodelled)
        lines += _growth_lines(growth(found.comparisons))
        lines += ["  furthest off:"] * bool(found.worst)
        lines += [f"    {_line(found, each)}" for each in found.worst]
    return "\n".join(lines)


def _stalled_lines(found: TrainingVerdict) -> list[str]:
    """Return which rows stall; published numbers alone determine it, before any prediction."""
    if not found.stalled:
        return []
    lines = ", ".join(map(str, found.stalled))
    return [
        f"{found.file}: {len(found.stalled)} rows stall: a micro-batch takes more than {SLOWER} "
        "times as long as with the same model, tensor and pipeline degree and micro-batch on "
        "another number of nodes",
        *wrap(f"lines {lines}", width=WIDTH, initial_indent="  ", subsequent_indent="  "),
    ]


def _line(found: TrainingVerdict, each: PredictedRun) -> str:
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
