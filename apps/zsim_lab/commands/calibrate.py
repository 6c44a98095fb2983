"""`zsim calibrate --from DIR`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code
from zsim.cli.printing import answer_before, print_answer
from zsim.mistake import MistakeError


def calibrate(
    source: Annotated[
        Path, typer.Option("--from", metavar="DIR", help="Folder of published tables, in CSV.")
    ],
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that the profiles are written to.")
    ] = Path("profiles"),
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Keep simulated runs here; do not repeat them."),
    ] = None,
) -> Code:
    """Fit constants of networks and kernels to published rows."""
    try:
        from zsim_lab.answer.calibration import calibrate as calibrate_from
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "scipy":
            raise
        raise MistakeError("calibrate: needs scipy (pip install 'zsim[calibrate]')") from None

    found = calibrate_from(source, to, report=_report, resume=resume)
    with answer_before(found.writers()):
        print_answer(found, as_json=False)
    return Code.DONE


def _report(line: str) -> None:
    print(line, file=sys.stderr)
