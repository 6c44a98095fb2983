"""Draw a cluster: its fabric from the top down, and one node in full.

If many boxes are equal, only the first ones and the last are drawn, with the number hidden between
them. A note at each level gives the number of links and the speed of one in each direction.
"""

from dataclasses import dataclass, field

from zsim.cluster.bisection import Cut
from zsim.cluster.cluster import Cluster
from zsim.cluster.links import link_classes, rails, top_name
from zsim.report.svg.canvas import ALARM, FAINT, Box, Canvas
from zsim.report.svg.host_drawing import ROW, has_host
from zsim.report.svg.irregular_fabric import draw_irregular, layout
from zsim.report.svg.node_drawing import draw_node
from zsim.report.svg.note import (
    LEFT,
    LEVEL,
    NODE,
    NOTES,
    RIGHT,
    SWITCH,
    TALL,
    TOP,
    WIDTH,
    note,
    rate,
)
from zsim.report.svg.utilization_color import Loads, between, hue, key

NO_LOADS: Loads = {}
SHOWN = {0: 6, 1: 4, 2: 2}
"""Number of boxes shown below the top, by the number of tiers; every other box shows two."""


def draw(cluster: Cluster, cut: Cut | None, loads: Loads = NO_LOADS, *, title: str = "") -> str:
    """Return `cluster` as SVG, with its narrowest `cut` in red, or links coloured by `loads`.

    With a `title`, the name of the cluster moves to the line below it.
    """
    levels = len(cluster.fabric.tiers) + 2
    irregular = layout(cluster) if cluster.fabric.edges else None
    below = TOP + (levels * LEVEL if irregular is None else irregular.height) + 30
    height = 340 + (ROW if has_host(loads) else 0)
    canvas = Canvas(WIDTH, below + height + 50, on_page=bool(loads))
    below_title = f"{cluster.name}: {_counts(cluster)}" if title else _counts(cluster)
    canvas.words(LEFT, 42, title or cluster.name, size=22, bold=True)
    canvas.words(LEFT, 68, below_title, size=14, colour=FAINT)
    if cut is not None:
        text = f"narrowest cut: {cut.where}, {rate(cut.bytes_per_s)} each way"
        text += f", {rate(int(cut.bytes_per_s_per_gpu))} for each GPU"
        canvas.words(LEFT, 92, text, size=14, colour=ALARM, bold=True)
    if irregular is None:
        first = _fabric(canvas, cluster, cut, loads)
    else:
        first = draw_irregular(canvas, cluster, irregular, loads)
    frame = Box(LEFT - 10, below, RIGHT - LEFT + 20, height)
    for x, end in ((first.x, frame.x), (first.x + first.width, frame.x + frame.width)):
        canvas.line((x, first.bottom), (end, frame.y), dashed=True, width=0.8)
    draw_node(canvas, cluster, frame, cut=cut, loads=loads)
    if loads:
        _key(canvas)
    return canvas.svg()


def _counts(cluster: Cluster) -> str:
    nodes, ranks = cluster.nodes, cluster.ranks
    parts = [f"{nodes:,} node{'s' * (nodes > 1)} of {cluster.gpus_per_node} {cluster.gpu.name}"]
    parts.append(f"{ranks:,} GPU{'s' * (ranks > 1)}")
    if cluster.nodes_per_domain > 1:
        parts.append(f"NVSwitch domains of {cluster.nodes_per_domain} nodes")
    return ", ".join(parts)


@dataclass(slots=True)
class _NodeGroup:
    """Nodes below one switch: the first node and the groups below.

    If `hidden` is not 0, the group is a placeholder for `hidden` groups that are not drawn.
    """

    level: int
    first: int
    number: int
    hidden: int = 0
    below: "list[_NodeGroup]" = field(default_factory=list["_NodeGroup"])
    x: float = 0
    width: float = 0


def _group(cluster: Cluster, level: int, first: int, end: int) -> _NodeGroup:
    """Return the groups from `level` down that hold nodes `first` to `end`; level 0 is a node."""
    sizes = [1, *(tier.nodes_below for tier in cluster.fabric.tiers)]
    found = _NodeGroup(level, first, first // sizes[level] if level < len(sizes) else 0)
    if level == 0:
        return found
    size = sizes[level - 1]
    starts = range(first, end, size)
    shown = SHOWN[len(sizes) - 1] if level == len(sizes) else 2
    keep = [*starts] if len(starts) <= shown + 1 else [*starts[: shown - 1], starts[-1]]
    for start in keep:
        if start == keep[-1] and len(keep) < len(starts):
            found.below.append(_NodeGroup(level - 1, -1, 0, hidden=len(starts) - len(keep)))
        found.below.append(_group(cluster, level - 1, start, min(start + size, end)))
    return found


def _place(group: _NodeGroup, x: float) -> float:
    """Set the positions of `group` from the bottom up, in node widths; return its right end."""
    group.x = x
    if not group.below:
        group.width = 0.75 if group.hidden else 1.0
        return x + group.width
    for each in group.below:
        x = _place(each, x) + 0.15
    group.width = x - group.x - 0.15
    return x


def _fabric(canvas: Canvas, cluster: Cluster, cut: Cut | None, loads: Loads) -> Box:
    """Draw the switches and nodes; return the box of the first node."""
    tiers = cluster.fabric.tiers
    top = _group(cluster, len(tiers) + 1, 0, cluster.nodes)
    _place(top, 0)
    scale = min((RIGHT - LEFT) / top.width, 130)
    levels = _Levels(canvas, cluster, scale, loads)
    levels.draw(top)
    boxes = levels.boxes
    _notes(canvas, cluster)
    _domains(canvas, cluster, boxes)
    level_of = {"node": 0, "domain": 0} | {tier.name: at + 1 for at, tier in enumerate(tiers)}
    if cut is not None and cut.level in level_of:
        y = TOP + (len(tiers) + 1 - level_of[cut.level]) * LEVEL - (LEVEL - TALL) / 2
        canvas.line((LEFT - 15, y), (NOTES - 12, y), colour=ALARM, width=2, dashed=True)
    if cut is not None and cut.level == "half" and cluster.nodes > 1:
        x = LEFT + top.width * scale / 2
        canvas.line((x, TOP - 12), (x, TOP + LEVEL), colour=ALARM, width=2, dashed=True)
    first = next(box for group, box in boxes if group.level == 0)
    bar = 30 if cluster.nodes_per_domain > 1 else 0
    return Box(first.x, first.y, first.width, first.height + bar)


@dataclass(slots=True)
class _Levels:
    """Draws groups below their parents, and records their boxes."""

    canvas: Canvas
    cluster: Cluster
    scale: float
    loads: Loads
    boxes: list[tuple[_NodeGroup, Box]] = field(default_factory=list[tuple[_NodeGroup, Box]])

    def draw(self, group: _NodeGroup) -> Box:
        """Draw a group and the groups below it; return its box."""
        y = TOP + (len(self.cluster.fabric.tiers) + 1 - group.level) * LEVEL
        box = Box(LEFT + group.x * self.scale, y, group.width * self.scale, TALL)
        if group.hidden:
            self._hidden(box, group.hidden)
            return box
        for each in group.below:
            inner = self.draw(each)
            if not each.hidden:
                _cable(self.canvas, inner, box, thick=each.level > 0, colour=self._hue(each.level))
        self.boxes.append((group, box))
        self._box(group, box)
        return box

    def _hue(self, level: int) -> str:
        """Return the colour of the links from `level` up; links of nodes start at their NICs."""
        names = [tier.name for tier in self.cluster.fabric.tiers]
        lower, upper = ["nic", *names][level], [*names, top_name(self.cluster)][level]
        if not names:
            upper = "network"
        return hue(between(self.loads, lower, upper), FAINT)

    def _hidden(self, box: Box, count: int) -> None:
        words = self.canvas.words
        words(box.middle, box.y + 20, "· · ·", size=18, anchor="middle", colour=FAINT)
        words(box.middle, box.y + 36, f"{count:,} more", size=10.5, anchor="middle", colour=FAINT)

    def _box(self, group: _NodeGroup, box: Box) -> None:
        tiers = self.cluster.fabric.tiers
        if group.level == 0:
            self.canvas.box(box, f"node {group.first:,}", NODE)
        elif group.level <= len(tiers):
            count = rails(self.cluster, group.level - 1)
            small = f"{count} switches, one for each rail" if count > 1 else ""
            label = f"{tiers[group.level - 1].name} {group.number:,}"
            self.canvas.box(box, label, SWITCH, small=small, stacked=count > 1)
        elif not self.cluster.fabric.kind.rails_meet:
            small = f"{self.cluster.nics_per_node} rails that do not meet"
            self.canvas.box(box, "a switch for each rail", SWITCH, small=small, stacked=True)
        else:
            label = f"{top_name(self.cluster)}s" if tiers else "one switch"
            self.canvas.box(box, label, SWITCH, small="never the limit", stacked=bool(tiers))


def _key(canvas: Canvas) -> None:
    """Draw the legend of the link colours."""
    x = NOTES
    canvas.words(x, 30, "share of the step that a link is busy", size=12, colour=FAINT)
    for row, (text, colour) in enumerate(key()):
        canvas.line((x, 46 + 16 * row), (x + 28, 46 + 16 * row), colour=colour, width=4)
        canvas.words(x + 38, 50 + 16 * row, text, size=12)


def _cable(canvas: Canvas, lower: Box, upper: Box, *, thick: bool, colour: str) -> None:
    for shift in (-5, 5):
        start = (lower.middle + shift, lower.y)
        reach = min(max(start[0], upper.x + 8), upper.x + upper.width - 8)
        canvas.line(start, (reach, upper.bottom), width=2.2 if thick else 1.2, colour=colour)


def _notes(canvas: Canvas, cluster: Cluster) -> None:
    """Write a note on the links next to the gap between each two levels."""
    tiers = cluster.fabric.tiers
    level_of = {"NIC": 0} | {tier.name: at + 1 for at, tier in enumerate(tiers)}
    for each in link_classes(cluster):
        if each.source in level_of:
            level = level_of[each.source]
            y = TOP + (len(tiers) + 1 - level) * LEVEL - (LEVEL - TALL) / 2 - 8
            note(canvas, y, each)
            if level:
                over = tiers[level - 1].oversubscription
                text = "not oversubscribed" if over == 1 else f"oversubscribed {over} : 1"
                canvas.words(NOTES, y + 32, text, size=11.5, colour=FAINT)


def _domains(canvas: Canvas, cluster: Cluster, boxes: list[tuple[_NodeGroup, Box]]) -> None:
    """Draw a bar below the nodes of each NVSwitch domain."""
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
        canvas.box(bar, f"NVSwitch domain {number:,}", SWITCH)
