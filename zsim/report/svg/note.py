"""Words beside a drawn cluster, and where on the canvas things stand."""

from zsim.cluster.cluster import Link
from zsim.cluster.links import LinkClass
from zsim.report.svg.canvas import Canvas
from zsim.units import format_bytes, format_seconds

WIDTH, LEFT, RIGHT, NOTES = 1320.0, 40.0, 980.0, 1010.0
"""The canvas; the picture is between LEFT and RIGHT, notes begin at NOTES."""
TOP, LEVEL, TALL = 110.0, 96.0, 40.0
"""The first box, from one level to the next, and the height of a box."""
SWITCH, NODE, GPU, NIC, PCIE = "#bcd6f2", "#e4e7eb", "#c6e6b9", "#fbd9a6", "#e6d5f2"


def rate(bytes_per_s: int) -> str:
    """Return a bandwidth as it is printed: "450 GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def speed(link: Link) -> str:
    """Return a link as it is printed: "450 GB/s, 1.7 us"."""
    if not link.latency_ps:
        return rate(link.bytes_per_s)
    return f"{rate(link.bytes_per_s)}, {format_seconds(link.latency_ps / 1e12)}"


def note(canvas: Canvas, y: float, each: LinkClass) -> None:
    """Write what links join, how many they are and how fast, at height `y`."""
    count = each.count
    what = f"{each.source} to {each.target}"
    canvas.words(NOTES, y, f"{what}: {count:,} link{'s' * (count > 1)}", size=13, bold=True)
    canvas.words(NOTES, y + 17, f"{speed(each.link)} each way", size=12.5)
