"""`zsim list`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, completed
from zsim.cli.printing import print_answer


def list_(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="KIND",
            help="One kind alone: scenarios, studies, models, gpus, ...",
            show_default=False,
            autocompletion=completed("installed_kinds"),
        ),
    ] = None,
) -> Code:
    """List scenarios, models, topologies, runtimes and others."""
    from zsim.api.shipped import installed

    print_answer(installed(kind), as_json=False)
    return Code.DONE
