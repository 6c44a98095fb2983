"""An explicit fabric from a list of edges in CSV.

    source,target,bandwidth_per_direction,latency
    node0,leaf0,400 GB/s,1 us
    node1,leaf0,400 GB/s,1 us

A fifth column `hops` may say for how many hops a link counts when the shortest way is chosen.
Each line is a link in both directions. `node0`, `node1` and so on are nodes with all their NICs;
every other name is a switch. Empty lines, and lines that start with #, are ignored.
"""

import csv
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from pydantic import ValidationError

from zsim.cluster.cluster import FabricEdge
from zsim.cluster.files.explicit_fabric import EdgeTable
from zsim.cluster.files.table import TopologyError
from zsim.config_error import line


def edges_text(edges: Sequence[FabricEdge]) -> str:
    """Return the CSV that lists `edges`, from which `fabric_from_edges` reads them again."""
    rows = [
        (each.source, each.target, f"{each.link.bytes_per_s} B/s", f"{each.link.latency_ps} ps")
        for each in edges
    ]
    hops = [(str(each.hops),) for each in edges] if any(each.hops > 1 for each in edges) else []
    lines = [tuple(EdgeTable.model_fields)[: 5 if hops else 4]]
    lines += [(*row, *more) for row, more in zip_longest(rows, hops, fillvalue=())]
    return "".join(f"{','.join(line)}\n" for line in lines)


def fabric_from_edges(name: str, text: str) -> dict[str, Any]:
    """Return the table of the explicit fabric that the CSV `text` of the file `name` lists.

    Raises:
        TopologyError: it is not such a list; the message is one line with the line number.
    """
    lines = [
        (number, row)
        for number, row in enumerate(text.splitlines(), 1)
        if row.strip() and not row.lstrip().startswith("#")
    ]
    *needed, optional = EdgeTable.model_fields
    try:
        rows = [
            (number, [cell.strip() for cell in row])
            for number, written in lines
            for row in csv.reader([written])
        ]
    except csv.Error as error:
        raise TopologyError(f"{name}: not CSV: {error}") from None
    columns = rows[0][1] if rows else []
    if columns not in (needed, [*needed, optional]):
        raise TopologyError(f"{name}: the first line must be {','.join(needed)}")
    if len(rows) == 1:
        raise TopologyError(f"{name}: no edges")
    edges: list[dict[str, str | int]] = []
    for number, row in rows[1:]:
        if len(row) != len(columns):
            raise TopologyError(
                f"{name}: line {number}: {len(row)} columns, must be {len(columns)}"
            )
        edge: dict[str, str | int] = dict(zip(columns, row, strict=True))
        if optional in columns and row[-1].isascii() and row[-1].isdecimal():
            edge[optional] = int(row[-1][:9])
        try:
            EdgeTable.model_validate(edge)
        except ValidationError as error:
            why = line(error.errors(include_url=False), EdgeTable)
            raise TopologyError(f"{name}: line {number}: {why}") from None
        edges.append(edge)
    return {"title": name, "kind": "explicit", "source": name, "edges": edges}
