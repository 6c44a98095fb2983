"""`zsim validate WHAT`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json
from zsim.mistake import MistakeError

NETWORK, TRAINING, MEMORY, PAPER = "network", "training", "memory", "paper"
KINDS = (NETWORK, TRAINING, MEMORY, PAPER)


def validate(
    what: Annotated[
        str, typer.Argument(metavar="|".join(KINDS), help="What is predicted.", show_default=False)
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of published tables, in CSV; all but paper."),
    ] = None,
    all_rows: Annotated[
        bool,
        typer.Option("--all-rows", help="Judge every row of all tables; none was fitted."),
    ] = False,
    json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw predicted against published; SVG or PNG."),
    ] = None,
) -> Code:
    """What is predicted beside what was published, with errors."""
    if all_rows:
        from zsim.cli.validate_all import validate_all

        if what:
            raise MistakeError(f"--all-rows: judges all tables, not {what} alone")
        if data is None:
            raise MistakeError("--data: missing; --all-rows needs a folder of published tables")
        if picture is not None:
            raise MistakeError(f"--picture: {picture}: is for {TRAINING} and {MEMORY}")
        validate_all(data, as_json=json)
    elif what == PAPER:
        from zsim.cli.validate_paper import validate_paper

        if data is not None:
            raise MistakeError(f"--data: {data}: {PAPER} takes none, its figures ship")
        validate_paper(as_json=json, drawing=picture)
    elif what not in KINDS:
        raise MistakeError(f"what: {what!r} must be one of {', '.join(KINDS)}")
    elif data is None:
        raise MistakeError(f"--data: missing; {what} needs a folder of published tables")
    elif what == NETWORK:
        from zsim.cli.validate import validate_network

        if picture is not None:
            raise MistakeError(f"--picture: {picture}: is for {TRAINING} and {MEMORY}")
        validate_network(data, as_json=json)
    else:
        from zsim.calibration.verdict import Quantity
        from zsim.cli.validate_training import validate_training

        quantity = Quantity.STEP_TIME if what == TRAINING else Quantity.MEMORY
        validate_training(data, quantity, as_json=json, picture=picture)
    return Code.DONE
