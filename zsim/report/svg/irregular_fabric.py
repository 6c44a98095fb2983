"""Draw the fabric of a cluster whose links are listed: every switch, node and link.

Nodes form the lowest row, switches one link away the next row, and so on. A link connects adjacent
rows or two boxes of one row. Within a row, links between neighbours are straight; others are arcs
over the boxes between.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from zsim.cluster.cluster import Cluster, FabricEdge
from zsim.cluster.links import edges_in_use, link_classes, summed_up
from zsim.report.svg.canvas import FAINT, Box, Canvas
from zsim.report.svg.note import LEFT, NODE, RIGHT, SWITCH, TOP, note, rate
from zsim.report.svg.utilization_color import Loads, between, hue

if TYPE_CHECKING:
    import networkx as nx

ROWS_TALL, BOX_WIDE, BOX_TALL = 410.0, 90.0, 28.0
"""Distance from the top row to the lowest one, and maximum width and height of a box."""
LOWEST_ARC, HIGHEST_ARC = 14.0, 190.0
"""Height of an arc over one box, and maximum height of an arc over the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLayout:
    """Positions of switches and nodes, by name.

    Attributes:
        boxes: box of each name.
        rows: row of each name; the lowest row is 0.
        places: index of each name in its row.
        widths: number of boxes in each row.
        roof: height of the arcs above the top row.
        arc: height of an arc over a whole row.
    """

    boxes: Mapping[str, Box]
    rows: Mapping[str, int]
    places: Mapping[str, int]
    widths: tuple[int, ...]
    roof: float
    arc: float

    @property
    def height(self) -> float:
        """Height of the fabric in pixels, including arcs and a margin."""
        return self.roof + ROWS_TALL + 50

    def rise(self, edge: FabricEdge) -> float:
        """Return the height of a link's arc; 0 for a straight link."""
        if self.rows[edge.source] != self.rows[edge.target]:
            return 0.0
        over = abs(self.places[edge.source] - self.places[edge.target]) - 1
        if not over:
            return 0.0
        widest = self.widths[self.rows[edge.source]] - 2
        return LOWEST_ARC + (self.arc - LOWEST_ARC) * over / widest


def layout(cluster: Cluster) -> FabricLayout:
    """Return the positions of the switches and nodes of `cluster`."""
    import networkx as nx

    graph: nx.Graph[str] = nx.Graph()
    edges = edges_in_use(cluster)
    graph.add_edges_from((edge.source, edge.target) for edge in edges)
    rows, order = _rows(graph, [f"node{node}" for node in range(cluster.nodes)])
    places = {name: at for row in order for at, name in enumerate(row)}
    step = ROWS_TALL / max(len(order) - 1, 1)
    top = len(order) - 1
    arched = any(
        rows[edge.source] == rows[edge.target] == top
        and abs(places[edge.source] - places[edge.target]) > 1
        for edge in edges
    )
    arc = min(HIGHEST_ARC, 0.45 * step)
    roof = arc if arched else 0.0
    boxes: dict[str, Box] = {}
    for number, row in enumerate(order):
        pitch = (RIGHT - LEFT) / len(row)
        width = min(BOX_WIDE, pitch * 0.85)
        y = TOP + roof + (top - number) * step
        for at, name in enumerate(row):
            boxes[name] = Box(LEFT + (at + 0.5) * pitch - width / 2, y, width, BOX_TALL)
    widths = tuple(map(len, order))
    return FabricLayout(boxes=boxes, rows=rows, places=places, widths=widths, roof=roof, arc=arc)


def _rows(graph: "nx.Graph[str]", nodes: list[str]) -> tuple[dict[str, int], list[list[str]]]:
    """Return the row of each name, and the rows from the lowest up, each in order.

    Within a row, switches are sorted by the mean position of their neighbours in lower rows. A
    switch that the nodes in use cannot reach belongs to the top row.
    """
    import networkx as nx

    rows: dict[str, int] = {}
    for distance, names in enumerate(nx.bfs_layers(graph, nodes)):
        rows |= dict.fromkeys(names, distance)
    unreached = max(rows.values()) + 1
    rows |= {name: unreached for name in graph if name not in rows}
    near = {node: min(graph[node]) for node in nodes}
    order = [sorted(nodes, key=lambda node: (near[node], int(node.removeprefix("node"))))]
    at: dict[str, float] = {}
    for row in range(1, max(rows.values()) + 1):
        at |= {name: (place + 0.5) / len(order[-1]) for place, name in enumerate(order[-1])}
        means = {
            name: fmean([at[each] for each in graph[name] if rows[each] < row] or [1.0])
            for name in graph
            if rows[name] == row
        }
        order.append(sorted(means, key=lambda name: (means[name], name)))
    return rows, order


def draw_irregular(canvas: Canvas, cluster: Cluster, found: FabricLayout, loads: Loads) -> Box:
    """Draw the fabric with the layout `found`, links coloured by their `loads`.

    Return the box of the first node.
    """
    edges = edges_in_use(cluster)
    fastest = max(edge.link.bytes_per_s for edge in edges)
    ends = _ends(found, edges)
    shares = {edge: between(loads, edge.source, edge.target) or 0.0 for edge in edges}
    for edge in sorted(edges, key=shares.__getitem__):  # the busiest on top
        share = shares[edge] if loads else None
        busy = f", {share:.1%} busy" if share is not None else ""
        words = f"{edge.source} to {edge.target}: {rate(edge.link.bytes_per_s)}{busy}"
        look = {"colour": hue(share, FAINT), "title": words}
        width = 1 + 3 * edge.link.bytes_per_s / fastest + (1.0 if loads else 0.0)
        start, end = ends[edge.source, edge.target], ends[edge.target, edge.source]
        canvas.arc(start, end, found.rise(edge), width=width, **look)
    for name, box in found.boxes.items():
        canvas.box(box, name, SWITCH if found.rows[name] else NODE)
    switched = [each for each in link_classes(cluster) if each.source in {"node", "switch"}]
    for row, each in enumerate(summed_up(switched)):
        note(canvas, TOP + 34 + 44 * row, each)
    return found.boxes["node0"]


def _ends(
    found: FabricLayout, edges: list[FabricEdge]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the point where each link meets the box of its first end, by both ends.

    Arcs of a box start side by side on its upper edge, ordered so that nested arcs do not cross.
    """
    ends: dict[tuple[str, str], tuple[float, float]] = {}
    arcs: dict[str, list[str]] = {}
    for edge in edges:
        for one, other in ((edge.source, edge.target), (edge.target, edge.source)):
            box, far = found.boxes[one], found.boxes[other]
            if found.rise(edge):
                arcs.setdefault(one, []).append(other)
            elif box.y == far.y:
                side = box.x + (box.width if far.x > box.x else 0)
                ends[one, other] = (side, box.y + BOX_TALL / 2)
            else:
                ends[one, other] = (box.middle, box.y if far.y < box.y else box.bottom)
    for one, others in arcs.items():
        box, at = found.boxes[one], found.places
        left = sorted((each for each in others if at[each] < at[one]), key=at.__getitem__)
        right = sorted((each for each in others if at[each] > at[one]), key=at.__getitem__)
        ordered = [*reversed(left), *reversed(right)]
        for number, other in enumerate(ordered, start=1):
            ends[one, other] = (box.x + box.width * number / (len(ordered) + 1), box.y)
    return ends
