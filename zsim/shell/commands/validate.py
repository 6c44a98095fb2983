"""`zsim validate WHAT`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.shell.mistake import MistakeError
from zsim.shell.option import Code, Json


def validate(
    what: Annotated[str, typer.Argument(metavar="network", help="What is predicted.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder of published tables, in CSV.")],
    json: Json = False,
) -> Code:
    """What is predicted beside what was published, with errors."""
    from zsim.shell.validate import validate_network

    if what != "network":
        raise MistakeError(f"{what!r} must be network")
    validate_network(data, as_json=json)
    return Code.DONE
