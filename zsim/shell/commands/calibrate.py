"""`zsim calibrate --from DIR`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.shell.option import Code


def calibrate(
    source: Annotated[
        Path, typer.Option("--from", metavar="DIR", help="Folder of published tables, in CSV.")
    ],
    to: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that the profiles are written to.")
    ] = Path("profiles"),
) -> Code:
    """Fit constants of networks and kernels to published rows."""
    from zsim.shell.calibrate import calibrate as calibrate_from

    calibrate_from(source, to)
    return Code.DONE
