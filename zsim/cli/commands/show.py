"""`zsim show NAME`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, shown_names


def show(
    name: Annotated[
        str,
        typer.Argument(
            help="A scenario, study, topology or part of one.",
            show_default=False,
            autocompletion=shown_names,
        ),
    ],
) -> Code:
    """Print a scenario, study, topology, node, fabric or GPU."""
    from zsim.files.source import shipped_text

    print(shipped_text(name), end="")
    return Code.DONE
