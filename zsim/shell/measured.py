"""Folders of published measurements, read for calibration and validation."""

import csv
from pathlib import Path

from zsim.calibration.measured import READERS, MeasuredError, Measurement, Unmodelled, read
from zsim.shell.mistake import MistakeError, file_fault


def measurements(folder: Path) -> dict[str, tuple[list[Measurement], list[Unmodelled]]]:
    """Rows of the known tables in `folder`, by name: those that can be predicted, and the rest.

    Raises:
        MistakeError: no table is there, or one cannot be read.
    """
    if not folder.is_dir():
        raise MistakeError(f"{folder}: no such folder")
    paths = [path for name in READERS if (path := folder / f"{name}.csv").exists()]
    if not paths:
        raise MistakeError(
            f"{folder}: holds none of {', '.join(f'{name}.csv' for name in READERS)}"
        )
    return {path.stem: _table(path) for path in paths}


def _table(path: Path) -> tuple[list[Measurement], list[Unmodelled]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, restval="", strict=True))
    except OSError as error:
        raise file_fault(str(path), error) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise MistakeError(f"{path}: not a table in CSV: {error}") from None
    try:
        return read(path.stem, rows)
    except MeasuredError as error:
        raise MistakeError(f"{path.parent / str(error)}") from None
