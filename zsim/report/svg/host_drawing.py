"""Draw the host side of a node: its memory, its drives, and the root ports towards the GPUs."""

from zsim.cluster.cluster import Cluster
from zsim.report.svg.canvas import FAINT, Box, Canvas
from zsim.report.svg.note import LEFT, RIGHT
from zsim.report.svg.utilization_color import Loads, between, hue

HOST, DRIVES = "#f3e3c3", "#d9d2c5"
ROW = 72.0
"""Height in pixels that the host side adds to a node."""

WIDE = 0.62
"""Share of the node's width for host memory; drives use the rest."""


def has_host(loads: Loads) -> bool:
    """Return True if `loads` include traffic to or from the host side."""
    return "host memory" in loads or any("host" in name.split("->") for name in loads)


def draw_host(
    canvas: Canvas, cluster: Cluster, *, y: float, ports: Box, last: Box, loads: Loads
) -> None:
    """Draw host memory and drives at height `y`, and their links to the boxes `ports` to `last`."""
    width = RIGHT - LEFT
    memory = Box(LEFT + 4, y, width * WIDE - 4, 40)
    drives = Box(LEFT + width * WIDE + 60, y, width * (1 - WIDE) - 64, 40)
    middle = y + memory.height / 2
    colour = hue(between(loads, "pcie", "host"), FAINT)
    edge, port = LEFT - 4, ports.y + ports.height / 2
    for start, end in (
        ((memory.x, middle), (edge, middle)),
        ((edge, middle), (edge, port)),
        ((edge, port), (last.x, port)),
    ):
        canvas.line(start, end, colour=colour, width=2.4)
    if cluster.drives is not None:
        canvas.line(
            (memory.x + memory.width, middle),
            (drives.x, middle),
            colour=hue(between(loads, "drives", "host"), FAINT),
            width=5,
        )
        count = cluster.drives.count
        canvas.box(drives, f"{count} drive{'s' * (count > 1)}", DRIVES)
    busy = loads.get("host memory")
    canvas.box(memory, "host memory" + (f", {busy:.0%} busy" if busy else ""), HOST)
