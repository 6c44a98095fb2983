"""`zsim calibrate`: published rows in, profile files out."""

import sys
from pathlib import Path

from zsim.calibration.calibrate import calibrated
from zsim.collective.profiles import Profiles, text
from zsim.shell.measured import measurements
from zsim.shell.mistake import file_fault
from zsim.shell.written import write


def calibrate(source: Path, target: Path) -> None:
    """Fit the tables in the folder `source`; write one file for each kind of GPU into `target`.

    Raises:
        MistakeError: there is nothing to read, or a file cannot be written.
    """
    tables = measurements(source)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise file_fault(str(target), error) from None
    rows = [row for found, _ in tables.values() for row in found]
    for profiles in calibrated(rows, report=lambda line: print(line, file=sys.stderr)):
        path = target / f"{profiles.gpu}.toml"
        write(path, text(profiles))
        print(f"{path}: {_errors(profiles)}")


def _errors(profiles: Profiles) -> str:
    parts: list[str] = []
    for size, name in (("16 MiB and more", "large"), ("64 KiB to 16 MiB", "medium")):
        fitted = profiles.errors.get(f"fitted_{name}")
        held_out = profiles.errors.get(f"held_out_{name}")
        if fitted is not None:
            beside = "nothing to hold out" if held_out is None else f"{held_out:.1%} held out"
            parts.append(f"{size}: median error {fitted:.1%} fitted, {beside}")
    return "; ".join(parts) or "no rows from 64 KiB up"
