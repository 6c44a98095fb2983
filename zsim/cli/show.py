"""`zsim show NAME`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, completed


def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A scenario, study, model, topology or part of one; with --template: gpu or node.",
            show_default=False,
            autocompletion=completed("shipped_names"),
        ),
    ],
    part: Annotated[
        str | None,
        typer.Argument(metavar="PART", help="Its name, where NAME is gpu, node or fabric."),
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="Print a file of a GPU or a node to fill in.")
    ] = False,
) -> Code:
    """Print a scenario, study, model, topology, node, fabric or GPU."""
    from zsim.api.shipped import part_of_kind, shipped_text, template_text

    if template:
        print(template_text(name, part), end="")
    else:
        print(shipped_text(name) if part is None else part_of_kind(name, part), end="")
    return Code.DONE
