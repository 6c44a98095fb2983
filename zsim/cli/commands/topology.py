"""`zsim topology NAME`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, at_least, topology_names


def topology(
    name: Annotated[
        str,
        typer.Argument(
            help="A system or node that ships, or a file.",
            show_default=False,
            autocompletion=topology_names,
        ),
    ],
    nodes: Annotated[
        int, typer.Option(metavar="N", parser=at_least(1), help="So many nodes of it.")
    ] = 1,
    fabric: Annotated[
        str | None, typer.Option(metavar="NAME", help="The fabric that a node is put on.")
    ] = None,
    drawing: Annotated[
        Path | None, typer.Option("--draw", metavar="FILE", help="Draw it there: .svg or .png.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change it: cluster.oversubscription=2, or gpu_memory, nics_per_node, nodes.",
        ),
    ] = None,
    json: Json = False,
) -> Code:
    """What a cluster is made of and can carry; draws it."""
    from zsim.cli.topology import Request, describe

    describe(
        Request(
            name=name,
            nodes=nodes,
            fabric=fabric,
            drawing=drawing,
            settings=tuple(settings or ()),
            as_json=json,
        )
    )
    return Code.DONE
