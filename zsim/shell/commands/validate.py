"""`zsim validate WHAT`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.shell.mistake import MistakeError
from zsim.shell.option import Code, Json

NETWORK, TRAINING, MEMORY = "network", "training", "memory"
KINDS = (NETWORK, TRAINING, MEMORY)


def validate(
    what: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="What is predicted.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of published tables, in CSV.")],
    json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw predicted against published; SVG or PNG."),
    ] = None,
) -> Code:
    """What is predicted beside what was published, with errors."""
    if what == NETWORK:
        from zsim.shell.validate import validate_network

        if picture is not None:
            raise MistakeError(f"--picture: {picture}: is for {TRAINING} and {MEMORY}")
        validate_network(data, as_json=json)
    elif what in (TRAINING, MEMORY):
        from zsim.shell.validate_training import validate_training
        from zsim.validation.verdict import Quantity

        quantity = Quantity.STEP_TIME if what == TRAINING else Quantity.MEMORY
        validate_training(data, quantity, as_json=json, picture=picture)
    else:
        raise MistakeError(f"{what!r} must be one of {', '.join(KINDS)}")
    return Code.DONE
