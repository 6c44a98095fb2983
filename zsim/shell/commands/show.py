"""`zsim show NAME`."""

from typing import Annotated

import typer

from zsim.shell.option import Code


def show(
    name: Annotated[
        str, typer.Argument(help="A scenario, study, topology or part of one.", show_default=False)
    ],
) -> Code:
    """Print a scenario, study, topology, node, fabric or GPU."""
    from zsim.shell.source import shipped_text

    print(shipped_text(name), end="")
    return Code.DONE
