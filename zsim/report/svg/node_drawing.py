"""Draw one node of a cluster in full: NICs, PCIe switches, GPUs and NVSwitches."""

from collections.abc import Iterator
from dataclasses import replace

from zsim.cluster.bisection import Cut
from zsim.cluster.cluster import Cluster, Fabric
from zsim.cluster.links import link_classes
from zsim.compute.host_rate import node_copy_bytes_per_s
from zsim.report.svg.canvas import ALARM, FAINT, Box, Canvas
from zsim.report.svg.host_drawing import draw_host, has_host
from zsim.report.svg.note import GPU, LEFT, NIC, NOTES, PCIE, RIGHT, SWITCH, note, rate
from zsim.report.svg.utilization_color import Loads, between, hue
from zsim.units import format_bytes


def draw_node(
    canvas: Canvas, cluster: Cluster, frame: Box, *, cut: Cut | None, loads: Loads
) -> None:
    """Draw one node in full, links coloured by their `loads` and the narrowest `cut` in red."""
    thin = 2.4 if loads else 1.2
    y = frame.y
    canvas.box(frame, "", "#f7f9fb")
    canvas.words(frame.x + 10, y + 20, "node 0", size=14, bold=True)
    gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
    rows = {"nic": y + 36, "pcie": y + 106, "gpu": y + 184, "hub": y + 268}
    cells = _row(nics, rows["nic"], 36), _row(gpus, rows["gpu"], 44)
    switches = _row(cluster.pcie_switches, rows["pcie"], 32)
    hubs = _row(1 if cluster.board_link is None else 2, rows["hub"], 40)
    if has_host(loads):
        ports = switches if cluster.pcie_link is not None else cells[1]
        y_host = rows["hub"] + 62
        draw_host(canvas, cluster, y=y_host, ports=ports[0], last=ports[-1], loads=loads)
    for number, cell in enumerate(cells[0]):
        row = switches if cluster.pcie_link is not None else cells[1]
        end = row[number * len(row) // nics]
        over = end.x < cell.middle < end.x + end.width
        canvas.line(
            (cell.middle, cell.bottom),
            (cell.middle if over else end.middle, end.y),
            colour=hue(between(loads, "switch", "nic"), FAINT),
            width=thin,
        )
    for number, cell in enumerate(cells[1]):
        hub = hubs[number * len(hubs) // gpus]
        busy = hue(between(loads, "gpu", "switch"), FAINT)
        canvas.line((cell.middle, cell.bottom), (cell.middle, hub.y), width=3, colour=busy)
        if cluster.pcie_link is not None:
            above = switches[number // cluster.gpus_per_pcie_switch]
            busy = hue(between(loads, "gpu", "pcie"), FAINT)
            canvas.line((cell.middle, cell.y), (cell.middle, above.bottom), colour=busy, width=thin)
    for number, cell in enumerate(cells[0]):
        canvas.box(cell, f"NIC {number}" if nics <= 16 else f"{number}", NIC)
    if cluster.pcie_link is not None:
        for cell in switches:
            canvas.box(cell, "PCIe switch", PCIE)
    for number, cell in enumerate(cells[1]):
        canvas.box(cell, f"GPU {number}", GPU)
    for number, cell in enumerate(hubs):
        label = "NVSwitch" if len(hubs) == 1 else f"NVSwitch of board {number}"
        if cluster.nodes_per_domain > 1:
            label = f"NVSwitch, shared by {cluster.nodes_per_domain} nodes"
        canvas.box(cell, label, SWITCH)
    if len(hubs) == 2:
        middle = rows["hub"] + 20
        busy = hue(between(loads, "board", "board"), FAINT)
        canvas.line((hubs[0].x + hubs[0].width, middle), (hubs[1].x, middle), width=5, colour=busy)
    _node_notes(canvas, cluster, rows)
    _node_cut(canvas, rows, cut, single=cluster.nodes == 1)


def _row(count: int, y: float, height: float) -> list[Box]:
    """Return `count` boxes in a row, without drawing them."""
    pitch = (RIGHT - LEFT) / count
    gap = min(14.0, pitch / 5)
    return [Box(LEFT + at * pitch + gap / 2, y, pitch - gap, height) for at in range(count)]


def _node_notes(canvas: Canvas, cluster: Cluster, rows: dict[str, float]) -> None:
    """Write notes on links and memory next to their rows, counting the links of one node."""
    for line, text in enumerate(_host_lines(cluster)):
        canvas.words(NOTES, rows["nic"] + 18 * line, text, size=12.5)
    places = {"PCIe switch": rows["pcie"] + 44, "NVSwitch": rows["gpu"] + 58}
    places["board"] = rows["hub"] + 26
    for each in link_classes(replace(cluster, nodes=1, fabric=Fabric())):
        if each.target in places:
            note(canvas, places[each.target], each)
    memory = f"{format_bytes(cluster.gpu.memory_bytes)} at {rate(cluster.gpu.memory_bytes_per_s)}"
    canvas.words(NOTES, rows["gpu"] + 14, f"GPU memory: {memory}", size=12.5)


def _host_lines(cluster: Cluster) -> Iterator[str]:
    """Yield lines on the host side: memory, total copy rate of all GPUs, drives."""
    host, drives = cluster.host, cluster.drives
    if host is not None:
        memory = f"{format_bytes(host.memory_bytes)} at {rate(host.memory_bytes_per_s)}"
        yield f"CPU memory: {memory}"
    if cluster.copies is not None:
        every = rate(int(node_copy_bytes_per_s(cluster, outward=False)))
        ports = f"{cluster.root_ports} root port{'s' * (cluster.root_ports > 1)}"
        yield f"copies to all GPUs: {every}, {ports}"
    if drives is not None:
        yield f"drives: {drives.count} of {format_bytes(drives.capacity_bytes)}"
        rates = {"read": drives.read_bytes_per_s, "written": drives.write_bytes_per_s}
        known = [f"{how} {rate(drives.count * each)}" for how, each in rates.items() if each]
        yield f"  all together {', '.join(known)}" if known else "  of unknown rates"


def _node_cut(canvas: Canvas, rows: dict[str, float], cut: Cut | None, *, single: bool) -> None:
    """Draw the narrowest cut if it is inside the node."""
    if cut is None:
        return
    red = {"colour": ALARM}
    if cut.level == "gpu":
        y = (rows["gpu"] + 44 + rows["hub"]) / 2
        canvas.line((LEFT - 15, y), (NOTES - 12, y), width=2, dashed=True, **red)
    elif cut.level == "board" or (single and cut.level == "half"):
        x = (LEFT + RIGHT) / 2
        canvas.line((x, rows["nic"]), (x, rows["hub"] + 52), width=2, dashed=True, **red)
