"""`zsim topology NAME`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Nodes, Topology
from zsim.cli.printing import answer_before, outputs, print_answer


def topology(
    name: Topology,
    nodes: Nodes = 1,
    fabric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Fabric of the nodes: a name, a file, or a line such as torus:sizes=4x4x4.",
        ),
    ] = None,
    drawing: Annotated[
        Path | None,
        typer.Option("--draw", metavar="FILE", help="Draw the cluster: .svg, .png or .pdf."),
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the links of the fabric as CSV."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help=(
                "Change it: cluster.oversubscription=2, gpu_memory, nics_per_node, "
                "nodes_per_domain, drives, nodes."
            ),
        ),
    ] = None,
    json: Json = False,
) -> Code:
    """Describe a cluster, and what it can carry; draw it."""
    from zsim.api.output import FileKind, need_output
    from zsim.api.topology_result import read_topology

    need_output("--draw", drawing, FileKind.PICTURE)
    need_output("--links", links, FileKind.ANY)
    found = read_topology(name, nodes=nodes, fabric=fabric, changes=settings)
    with answer_before(outputs((drawing, found.picture), (links, found.save_links))):
        print_answer(found, as_json=json)
    return Code.DONE
