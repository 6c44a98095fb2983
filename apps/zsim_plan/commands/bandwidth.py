"""`zsim bandwidth NAME`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Nodes, Topology
from zsim.cli.printing import print_answer


def bandwidth(
    name: Topology,
    nodes: Nodes = 1,
    tokens: Annotated[int, typer.Option(metavar="N", help="Tokens of each GPU in a step.")] = 2048,
    hidden: Annotated[int, typer.Option(metavar="N", help="Width of the model.")] = 8192,
    peak: Annotated[
        float | None,
        typer.Option(metavar="FLOPS", help="FLOP/s that a GPU reaches; default its data sheet."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change it: cluster.drives=8, cluster.nics_per_node=4.",
        ),
    ] = None,
    json: Json = False,
) -> Code:
    """Find the bandwidth that offloaded states need."""
    from zsim_plan.answer.bandwidth_result import bandwidth as bandwidth_of

    found = bandwidth_of(
        name, nodes=nodes, tokens=tokens, hidden=hidden, peak_flops=peak, changes=settings
    )
    print_answer(found, as_json=json)
    return Code.DONE
