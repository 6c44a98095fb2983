"""Notes next to a drawn cluster, and the layout constants of its canvas."""

from zsim.cluster.cluster import Link
from zsim.cluster.links import LinkClass
from zsim.report.svg.canvas import Canvas
from zsim.units import format_bytes, format_seconds

WIDTH, LEFT, RIGHT, NOTES = 1320.0, 40.0, 980.0, 1010.0
"""Width of the canvas; the picture lies between LEFT and RIGHT, notes start at NOTES."""
TOP, LEVEL, TALL = 110.0, 96.0, 40.0
"""Position of the first box, distance between levels, and height of a box."""
SWITCH, NODE, GPU, NIC, PCIE = "#bcd6f2", "#e4e7eb", "#c6e6b9", "#fbd9a6", "#e6d5f2"


def rate(bytes_per_s: int) -> str:
    """Return a bandwidth as text, such as "450 GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def speed(link: Link) -> str:
    """Return the speed of a link as text, such as "450 GB/s, 1.7 us"."""
    if not link.latency_ps:
        return rate(link.bytes_per_s)
    return f"{rate(link.bytes_per_s)}, {format_seconds(link.latency_ps / 1e12)}"


def note(canvas: Canvas, y: float, each: LinkClass) -> None:
    """Write the ends, the number and the speed of a class of links at height `y`."""
    count = each.count
    what = f"{each.source} to {each.target}"
    canvas.words(NOTES, y, f"{what}: {count:,} link{'s' * (count > 1)}", size=13, bold=True)
    canvas.words(NOTES, y + 17, f"{speed(each.link)} each way", size=12.5)
