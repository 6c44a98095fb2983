"""A cluster as a picture: the fabric from the top down, and one node of it in full.

Of many equal things the first and the last are shown, with how many are left out between. Beside
each level stand its links: how many, and how fast one is in each direction.
"""

from dataclasses import dataclass, field, replace
from statistics import fmean

import networkx as nx

from zsim.cluster import Cluster, Fabric, FabricKind, Link
from zsim.sheet import ALARM, FAINT, Box, Sheet
from zsim.topology.cut import Cut
from zsim.topology.description import LinkClass, edges_in_use, link_classes, rails, top_name
from zsim.units import format_bytes, format_seconds

WIDTH, LEFT, RIGHT, NOTES = 1320.0, 40.0, 980.0, 1010.0
"""The sheet; the picture is between LEFT and RIGHT, notes begin at NOTES."""
TOP, LEVEL, TALL = 110.0, 96.0, 40.0
"""The first box, from one level to the next, and the height of a box."""
SWITCH, NODE, GPU, NIC, PCIE = "#bcd6f2", "#e4e7eb", "#c6e6b9", "#fbd9a6", "#e6d5f2"
SHOWN = {0: 6, 1: 4, 2: 2}
"""Boxes shown below the top, by the number of tiers; below each other box there are two."""


def draw(cluster: Cluster, cut: Cut | None) -> str:
    """The SVG of `cluster`, with its narrowest `cut` in red."""
    levels = len(cluster.fabric.tiers) + 2
    explicit = cluster.fabric.kind is FabricKind.EXPLICIT
    below = TOP + (460 if explicit else levels * LEVEL) + 30
    sheet = Sheet(WIDTH, below + 390)
    sheet.words(LEFT, 42, cluster.name, size=22, bold=True)
    sheet.words(LEFT, 68, _counts(cluster), size=14, colour=FAINT)
    if cut is not None:
        text = f"narrowest cut: {cut.where}, {rate(cut.bytes_per_s)} each way"
        text += f", {rate(int(cut.bytes_per_s_per_gpu))} for each GPU"
        sheet.words(LEFT, 92, text, size=14, colour=ALARM, bold=True)
    first = _irregular(sheet, cluster) if explicit else _fabric(sheet, cluster, cut)
    frame = Box(LEFT - 10, below, RIGHT - LEFT + 20, 340)
    for x, end in ((first.x, frame.x), (first.x + first.width, frame.x + frame.width)):
        sheet.line((x, first.bottom), (end, frame.y), dashed=True, width=0.8)
    _node(sheet, cluster, frame, cut)
    return sheet.svg()


def rate(bytes_per_s: int) -> str:
    """A bandwidth as it is printed: "450 GB/s"."""
    return f"{format_bytes(bytes_per_s)}/s"


def speed(link: Link) -> str:
    """A link as it is printed: "450 GB/s, 1.7 us"."""
    if not link.latency_ps:
        return rate(link.bytes_per_s)
    return f"{rate(link.bytes_per_s)}, {format_seconds(link.latency_ps / 1e12)}"


def _counts(cluster: Cluster) -> str:
    nodes, ranks = cluster.nodes, cluster.ranks
    parts = [f"{nodes:,} node{'s' * (nodes > 1)} of {cluster.gpus_per_node} {cluster.gpu.name}"]
    parts.append(f"{ranks:,} GPU{'s' * (ranks > 1)}")
    if cluster.nodes_per_domain > 1:
        parts.append(f"NVSwitch domains of {cluster.nodes_per_domain} nodes")
    return ", ".join(parts)


@dataclass(slots=True)
class _Group:
    """Nodes below one switch: the first of them, and the groups below; `hidden` stands for more."""

    level: int
    first: int
    number: int
    hidden: int = 0
    below: "list[_Group]" = field(default_factory=list["_Group"])
    x: float = 0
    width: float = 0


def _group(cluster: Cluster, level: int, first: int, end: int) -> _Group:
    """The groups from `level` down that hold nodes `first` to `end`; level 0 is a node."""
    sizes = [1, *(tier.nodes_below for tier in cluster.fabric.tiers)]
    found = _Group(level, first, first // sizes[level] if level < len(sizes) else 0)
    if level == 0:
        return found
    size = sizes[level - 1]
    starts = range(first, end, size)
    shown = SHOWN[len(sizes) - 1] if level == len(sizes) else 2
    keep = [*starts] if len(starts) <= shown + 1 else [*starts[: shown - 1], starts[-1]]
    for start in keep:
        if start == keep[-1] and len(keep) < len(starts):
            found.below.append(_Group(level - 1, -1, 0, hidden=len(starts) - len(keep)))
        found.below.append(_group(cluster, level - 1, start, min(start + size, end)))
    return found


def _place(group: _Group, x: float) -> float:
    """Widths in units, from the bottom up; the end of `group`."""
    group.x = x
    if not group.below:
        group.width = 0.75 if group.hidden else 1.0
        return x + group.width
    for each in group.below:
        x = _place(each, x) + 0.15
    group.width = x - group.x - 0.15
    return x


def _fabric(sheet: Sheet, cluster: Cluster, cut: Cut | None) -> Box:
    """The switches and nodes; the box of the first node."""
    tiers = cluster.fabric.tiers
    top = _group(cluster, len(tiers) + 1, 0, cluster.nodes)
    _place(top, 0)
    scale = min((RIGHT - LEFT) / top.width, 130)
    levels = _Levels(sheet, cluster, scale)
    levels.draw(top)
    boxes = levels.boxes
    _notes(sheet, cluster)
    _domains(sheet, cluster, boxes)
    level_of = {"node": 0, "domain": 0} | {tier.name: at + 1 for at, tier in enumerate(tiers)}
    if cut is not None and cut.level in level_of:
        y = TOP + (len(tiers) + 1 - level_of[cut.level]) * LEVEL - (LEVEL - TALL) / 2
        sheet.line((LEFT - 15, y), (NOTES - 12, y), colour=ALARM, width=2, dashed=True)
    if cut is not None and cut.level == "half" and cluster.nodes > 1:
        x = LEFT + top.width * scale / 2
        sheet.line((x, TOP - 12), (x, TOP + LEVEL), colour=ALARM, width=2, dashed=True)
    first = next(box for group, box in boxes if group.level == 0)
    bar = 30 if cluster.nodes_per_domain > 1 else 0
    return Box(first.x, first.y, first.width, first.height + bar)


@dataclass(slots=True)
class _Levels:
    """Draws groups, each below its own, and keeps where they are."""

    sheet: Sheet
    cluster: Cluster
    scale: float
    boxes: list[tuple[_Group, Box]] = field(default_factory=list[tuple[_Group, Box]])

    def draw(self, group: _Group) -> Box:
        """A group and what is below it; its box."""
        y = TOP + (len(self.cluster.fabric.tiers) + 1 - group.level) * LEVEL
        box = Box(LEFT + group.x * self.scale, y, group.width * self.scale, TALL)
        if group.hidden:
            self._hidden(box, group.hidden)
            return box
        for each in group.below:
            inner = self.draw(each)
            if not each.hidden:
                _cable(self.sheet, inner, box, thick=each.level > 0)
        self.boxes.append((group, box))
        self._box(group, box)
        return box

    def _hidden(self, box: Box, count: int) -> None:
        words = self.sheet.words
        words(box.middle, box.y + 20, "· · ·", size=18, anchor="middle", colour=FAINT)
        words(box.middle, box.y + 36, f"{count:,} more", size=10.5, anchor="middle", colour=FAINT)

    def _box(self, group: _Group, box: Box) -> None:
        tiers = self.cluster.fabric.tiers
        if group.level == 0:
            self.sheet.box(box, f"node {group.first:,}", NODE)
        elif group.level <= len(tiers):
            count = rails(self.cluster, group.level - 1)
            small = f"{count} switches, one for each rail" if count > 1 else ""
            label = f"{tiers[group.level - 1].name} {group.number:,}"
            self.sheet.box(box, label, SWITCH, small=small, stacked=count > 1)
        elif self.cluster.fabric.kind is FabricKind.RAIL_ONLY:
            small = f"{self.cluster.nics_per_node} rails that do not meet"
            self.sheet.box(box, "a switch for each rail", SWITCH, small=small, stacked=True)
        else:
            label = f"{top_name(self.cluster)}s" if tiers else "one switch"
            self.sheet.box(box, label, SWITCH, small="never the limit", stacked=bool(tiers))


def _cable(sheet: Sheet, lower: Box, upper: Box, *, thick: bool) -> None:
    for shift in (-5, 5):
        start = (lower.middle + shift, lower.y)
        reach = min(max(start[0], upper.x + 8), upper.x + upper.width - 8)
        sheet.line(start, (reach, upper.bottom), width=2.2 if thick else 1.2)


def _notes(sheet: Sheet, cluster: Cluster) -> None:
    """Beside each gap between two levels, the links in it."""
    tiers = cluster.fabric.tiers
    level_of = {"NIC": 0} | {tier.name: at + 1 for at, tier in enumerate(tiers)}
    for each in link_classes(cluster):
        if each.source in level_of:
            level = level_of[each.source]
            y = TOP + (len(tiers) + 1 - level) * LEVEL - (LEVEL - TALL) / 2 - 8
            _note(sheet, y, each)
            if level:
                over = tiers[level - 1].oversubscription
                text = "not oversubscribed" if over == 1 else f"oversubscribed {over} : 1"
                sheet.words(NOTES, y + 32, text, size=11.5, colour=FAINT)


def _note(sheet: Sheet, y: float, each: LinkClass) -> None:
    count = each.count
    what = f"{each.source} to {each.target}"
    sheet.words(NOTES, y, f"{what}: {count:,} link{'s' * (count > 1)}", size=13, bold=True)
    sheet.words(NOTES, y + 17, f"{speed(each.link)} each way", size=12.5)


def _domains(sheet: Sheet, cluster: Cluster, boxes: list[tuple[_Group, Box]]) -> None:
    """A bar below the nodes whose GPUs one NVSwitch joins."""
    if cluster.nodes_per_domain == 1:
        return
    found: dict[int, list[Box]] = {}
    for group, box in boxes:
        if group.level == 0:
            found.setdefault(group.first // cluster.nodes_per_domain, []).append(box)
    for number, members in found.items():
        left = min(box.x for box in members)
        right = max(box.x + box.width for box in members)
        bar = Box(left, members[0].bottom + 8, right - left, 22)
        sheet.box(bar, f"NVSwitch domain {number:,}", SWITCH)


def _irregular(sheet: Sheet, cluster: Cluster) -> Box:
    """The graph of an explicit fabric, switches by how far they are from nodes; the first node."""
    graph: nx.Graph[str] = nx.Graph()
    edges = edges_in_use(cluster)
    for edge in edges:
        graph.add_edge(edge.source, edge.target)
    nodes = [f"node{node}" for node in range(cluster.nodes)]
    boxes = _layers(graph, nodes)
    fastest = max(edge.link.bytes_per_s for edge in edges)
    for edge in edges:
        low, high = sorted((boxes[edge.source], boxes[edge.target]), key=lambda box: -box.y)
        thick = 1 + 3 * edge.link.bytes_per_s / fastest
        if low.y == high.y:
            sheet.line((low.middle, low.y + 13), (high.middle, high.y + 13), width=thick)
        else:
            sheet.line((low.middle, low.y), (high.middle, high.bottom), width=thick)
    for name, box in boxes.items():
        sheet.box(box, name, NODE if name in nodes else SWITCH)
    switched = [each for each in link_classes(cluster) if each.target == "switch"]
    for row, each in enumerate(switched):
        _note(sheet, TOP + 20 + 44 * row, each)
    return boxes["node0"]


def _layers(graph: "nx.Graph[str]", nodes: list[str]) -> dict[str, Box]:
    """Boxes in rows: nodes at the bottom, above them what is one link away, and so on.

    In a row each stands by the mean place of those below it that it is joined to.
    """
    far: dict[str, int] = {}
    for distance, names in enumerate(nx.bfs_layers(graph, nodes)):
        far |= dict.fromkeys(names, distance)
    depth = max(far.values())
    step = 410 / max(depth, 1)
    near = {node: min(graph[node]) for node in nodes}
    order = sorted(nodes, key=lambda node: (near[node], int(node.removeprefix("node"))))
    places: dict[str, float] = {}
    boxes: dict[str, Box] = {}
    for layer in range(depth + 1):
        if layer:
            means = {
                name: fmean(places[each] for each in graph[name] if far[each] < layer)
                for name in graph
                if far[name] == layer
            }
            order = sorted(means, key=lambda name: (means[name], name))
        pitch = (RIGHT - LEFT) / len(order)
        width = min(90.0, pitch * 0.85)
        for at, name in enumerate(order):
            places[name] = LEFT + (at + 0.5) * pitch
            boxes[name] = Box(places[name] - width / 2, TOP + (depth - layer) * step, width, 28)
    return boxes


def _node(sheet: Sheet, cluster: Cluster, frame: Box, cut: Cut | None) -> None:
    """One node in full."""
    y = frame.y
    sheet.box(frame, "", "#f7f9fb")
    sheet.words(frame.x + 10, y + 20, "node 0", size=14, bold=True)
    gpus, nics = cluster.gpus_per_node, cluster.nics_per_node
    rows = {"nic": y + 36, "pcie": y + 106, "gpu": y + 184, "hub": y + 268}
    cells = _row(nics, rows["nic"], 36), _row(gpus, rows["gpu"], 44)
    switches = _row(cluster.pcie_switches, rows["pcie"], 32)
    hubs = _row(1 if cluster.board_link is None else 2, rows["hub"], 40)
    for number, cell in enumerate(cells[0]):
        row = switches if cluster.pcie_link is not None else cells[1]
        end = row[number * len(row) // nics]
        over = end.x < cell.middle < end.x + end.width
        sheet.line((cell.middle, cell.bottom), (cell.middle if over else end.middle, end.y))
    for number, cell in enumerate(cells[1]):
        hub = hubs[number * len(hubs) // gpus]
        sheet.line((cell.middle, cell.bottom), (cell.middle, hub.y), width=3)
        if cluster.pcie_link is not None:
            above = switches[number // cluster.gpus_per_pcie_switch]
            sheet.line((cell.middle, cell.y), (cell.middle, above.bottom))
    for number, cell in enumerate(cells[0]):
        sheet.box(cell, f"NIC {number}" if nics <= 16 else f"{number}", NIC)
    if cluster.pcie_link is not None:
        for cell in switches:
            sheet.box(cell, "PCIe switch", PCIE)
    for number, cell in enumerate(cells[1]):
        sheet.box(cell, f"GPU {number}", GPU)
    for number, cell in enumerate(hubs):
        label = "NVSwitch" if len(hubs) == 1 else f"NVSwitch of board {number}"
        if cluster.nodes_per_domain > 1:
            label = f"NVSwitch, shared by {cluster.nodes_per_domain} nodes"
        sheet.box(cell, label, SWITCH)
    if len(hubs) == 2:
        middle = rows["hub"] + 20
        sheet.line((hubs[0].x + hubs[0].width, middle), (hubs[1].x, middle), width=5)
    _node_notes(sheet, cluster, rows)
    _node_cut(sheet, rows, cut, single=cluster.nodes == 1)


def _row(count: int, y: float, height: float) -> list[Box]:
    """So many boxes beside each other."""
    pitch = (RIGHT - LEFT) / count
    gap = min(14.0, pitch / 5)
    return [Box(LEFT + at * pitch + gap / 2, y, pitch - gap, height) for at in range(count)]


def _node_notes(sheet: Sheet, cluster: Cluster, rows: dict[str, float]) -> None:
    """Links and memory of the node, beside their rows; those of one node, not of all."""
    host, drives = cluster.host, cluster.drives
    y = rows["nic"]
    if host is not None:
        memory = f"{format_bytes(host.memory_bytes)} at {rate(host.memory_bytes_per_s)}"
        sheet.words(NOTES, y, f"CPU memory: {memory}", size=12.5)
    if drives is not None:
        text = f"drives: {drives.count} of {format_bytes(drives.capacity_bytes)}"
        sheet.words(NOTES, y + 18, text, size=12.5)
    places = {"PCIe switch": rows["pcie"] + 44, "NVSwitch": rows["gpu"] + 58}
    places["board"] = rows["hub"] + 26
    for each in link_classes(replace(cluster, nodes=1, fabric=Fabric())):
        if each.target in places:
            _note(sheet, places[each.target], each)
    memory = f"{format_bytes(cluster.gpu.memory_bytes)} at {rate(cluster.gpu.memory_bytes_per_s)}"
    sheet.words(NOTES, rows["gpu"] + 14, f"GPU memory: {memory}", size=12.5)


def _node_cut(sheet: Sheet, rows: dict[str, float], cut: Cut | None, *, single: bool) -> None:
    """The narrowest cut, where it is inside the node."""
    if cut is None:
        return
    red = {"colour": ALARM}
    if cut.level == "gpu":
        y = (rows["gpu"] + 44 + rows["hub"]) / 2
        sheet.line((LEFT - 15, y), (NOTES - 12, y), width=2, dashed=True, **red)
    elif cut.level == "board" or (single and cut.level == "half"):
        x = (LEFT + RIGHT) / 2
        sheet.line((x, rows["nic"]), (x, rows["hub"] + 52), width=2, dashed=True, **red)
