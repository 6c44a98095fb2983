"""Folders of published measurements, read for calibration and validation."""

import csv
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from io import StringIO
from pathlib import Path
from typing import TypeVar

from zsim.files.input_file import read_file
from zsim.files.output_file import is_folder
from zsim.mistake import MistakeError, file_fault, mistakes
from zsim_lab.rows import collective_rows, kernel_rows
from zsim_lab.rows.collective_rows import Measurement
from zsim_lab.rows.csv_rows import Cells, MeasuredError, Unmodelled
from zsim_lab.rows.expert_tables import EXPERT_TABLES, ExpertRow
from zsim_lab.rows.kernel_rows import KernelRow
from zsim_lab.rows.link_rows import LINK_TABLES, TimedLinks, read_links
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES

Found = TypeVar("Found")


def measurements(folder: Path) -> dict[str, tuple[list[Measurement], list[Unmodelled]]]:
    """Return rows of the known tables of collectives in `folder`, by name: modelled, unmodelled.

    Raises:
        MistakeError: no table is there, or one cannot be read.
    """
    _found(folder, collective_rows.READERS)
    return measurements_of(folder)


def measurements_of(folder: Path) -> dict[str, tuple[list[Measurement], list[Unmodelled]]]:
    """Return the same; it may be empty.

    Raises:
        MistakeError: one cannot be read.
    """
    paths = [folder / f"{name}.csv" for name in collective_rows.READERS]
    return {path.stem: _read(path, collective_rows.read) for path in paths if path.exists()}


def all_tables(
    folder: Path,
) -> tuple[
    dict[str, tuple[list[Measurement], list[Unmodelled]]],
    dict[str, tuple[list[KernelRow], list[Unmodelled]]],
]:
    """Return rows of the known tables in `folder`, by name: of collectives, and of kernels.

    Raises:
        MistakeError: no table of either kind is there, or one cannot be read.
    """
    paths = _found(folder, (*collective_rows.READERS, *kernel_rows.READERS))
    networks = [path for path in paths if path.stem in collective_rows.READERS]
    kernels = [path for path in paths if path.stem in kernel_rows.READERS]
    return (
        {path.stem: _read(path, collective_rows.read) for path in networks},
        {path.stem: _read(path, kernel_rows.read) for path in kernels},
    )


def published_runs(folder: Path) -> dict[str, list[Published]]:
    """Return rows of the known tables of training in `folder`, by name, modelled or not.

    Raises:
        MistakeError: no table is there, or one cannot be read.
    """
    _found(folder, TABLES)
    return runs_of(folder)


def runs_of(folder: Path) -> dict[str, list[Published]]:
    """Return the same tables; there may be none.

    Raises:
        MistakeError: one cannot be read.
    """
    found: dict[str, list[Published]] = {}
    for name, table in TABLES.items():
        path = folder / f"{name}.csv"
        if path.exists():
            with _of(folder):
                found[name] = table.read(_rows(path))
    return found


def expert_rows(folder: Path) -> dict[str, tuple[list[ExpertRow], list[Unmodelled]]]:
    """Return rows of the tables of experts in `folder`, by name: modelled, unmodelled.

    Raises:
        MistakeError: no table is there, or one cannot be read.
    """
    found: dict[str, tuple[list[ExpertRow], list[Unmodelled]]] = {}
    for path in _found(folder, EXPERT_TABLES):
        with _of(folder):
            found[path.stem] = EXPERT_TABLES[path.stem].read(_rows(path))
    return found


def not_read(folder: Path) -> list[str]:
    """Return the tables in `folder` whose form no command supports."""
    known = {*TABLES, *EXPERT_TABLES, *LINK_TABLES}
    known |= {*collective_rows.READERS, *kernel_rows.READERS}
    return sorted(path.name for path in folder.glob("*.csv") if path.stem not in known)


def _found(folder: Path, names: Collection[str]) -> list[Path]:
    """Return the files in `folder` with these names; at least one."""
    if not is_folder("data", folder):
        raise MistakeError(f"{folder}: no such folder")
    paths = [path for name in names if (path := folder / f"{name}.csv").exists()]
    if not paths:
        raise MistakeError(f"{folder}: holds none of {', '.join(f'{name}.csv' for name in names)}")
    return paths


def timed_links(folder: Path) -> dict[str, list[TimedLinks]]:
    """Return rows of the tables of links in `folder`, by kind of GPU; there may be none.

    Raises:
        MistakeError: one cannot be read.
    """
    found: dict[str, list[TimedLinks]] = {}
    for name, gpu in LINK_TABLES.items():
        path = folder / f"{name}.csv"
        if path.exists():
            with _of(folder):
                found[gpu] = read_links(name, _rows(path))
    return found


def _read(
    path: Path, read: Callable[[str, list[Cells]], tuple[list[Found], list[Unmodelled]]]
) -> tuple[list[Found], list[Unmodelled]]:
    with _of(path.parent):
        return read(path.stem, _rows(path))


def _of(folder: Path) -> AbstractContextManager[None]:
    """Return a context that converts an error in a table to a MistakeError about `folder`."""
    return mistakes(MeasuredError, prefix=f"{folder}/")


def _rows(path: Path) -> list[Cells]:
    try:
        return list(csv.DictReader(StringIO(read_file(path)), restval="", strict=True))
    except OSError as error:
        raise file_fault(str(path), error) from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise MistakeError(f"{path}: not a table in CSV: {error}") from None
