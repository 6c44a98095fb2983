"""`zsim show NAME`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, completed


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A scenario, study, model, topology or part of one.",
            show_default=False,
            autocompletion=completed("shipped_names"),
        ),
    ],
) -> Code:
    """Print a scenario, study, model, topology, node, fabric or GPU."""
    from zsim.api.shipped import shipped_text

    print(shipped_text(name), end="")
    return Code.DONE
