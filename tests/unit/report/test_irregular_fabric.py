"""A fabric that is given as a list of links is drawn with all of them, each in its own place."""

import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest

from zsim.cli.main import answer
from zsim.cluster.cluster import Cluster
from zsim.files.installed import topology
from zsim.report.svg.cluster_drawing import draw
from zsim.report.svg.utilization_color import BUSIEST

COLUMNS = "source,target,bandwidth_per_direction,latency\n"
Edge = tuple[str, str, str]


def ring() -> list[Edge]:
    """Four switches in two rows and two columns, each joined to the next one around."""
    nodes = [(f"node{at}", f"s{at}", "400 GB/s") for at in range(4)]
    around = ("s0", "s1"), ("s1", "s3"), ("s3", "s2"), ("s2", "s0")
    return nodes + [(one, other, "100 GB/s") for one, other in around]


def dragonfly(groups: int, size: int) -> list[Edge]:
    """Groups of switches, all joined inside, and each group once to each other one."""
    edges: list[Edge] = []
    for group in range(groups):
        names = [f"g{group}s{at}" for at in range(size)]
        edges += [(f"node{group * size + at}", name, "400 GB/s") for at, name in enumerate(names)]
        edges += [(one, other, "200 GB/s") for one, other in combinations(names, 2)]
    for one, other in combinations(range(groups), 2):
        ends = f"g{one}s{(other - 1) % size}", f"g{other}s{one % size}"
        edges.append((*ends, "50 GB/s"))
    return edges


def fat_tree() -> list[Edge]:
    """Eight nodes on four leaves, which two spines join."""
    nodes = [(f"node{at}", f"leaf{at // 2}", "400 GB/s") for at in range(8)]
    return nodes + [(f"leaf{a}", f"spine{b}", "400 GB/s") for a in range(4) for b in range(2)]


BEHIND = ("node4", "s0"), ("node4", "far"), ("far", "farther")
FABRICS = {
    "ring": (ring(), 4),
    "dragonfly of 9": (dragonfly(3, 3), 9),
    "dragonfly of 36": (dragonfly(9, 4), 36),
    "fat tree": (fat_tree(), 8),
    # Without node4 nothing reaches the switches behind it.
    "left out": ([*ring(), *((one, other, "1 GB/s") for one, other in BEHIND)], 4),
}


def written(path: Path, edges: list[Edge]) -> Path:
    path.write_text(COLUMNS + "".join(f"{','.join(edge)},1 us\n" for edge in edges), "utf-8")
    return path


def cluster(path: Path, name: str) -> Cluster:
    edges, nodes = FABRICS[name]
    return topology("dgx_h100", str(written(path / "links.csv", edges)), nodes)


PATH = re.compile(
    r'<path d="M ([\d.]+) ([\d.]+) Q ([\d.]+) (-?[\d.]+) ([\d.]+) ([\d.]+)" fill="none" '
    r'stroke="(#\w+)"[^>]*><title>(\S+) to (\S+): ([^<]*)</title></path>'
)
BOX = re.compile(
    r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"[^>]*/>\n'
    r"<text [^>]*>([^<]*)<"
)

Point = tuple[float, float]


def boxes(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """The boxes of a picture by the names in them."""
    return {name: (float(x), float(y), float(w), float(h)) for x, y, w, h, name in BOX.findall(svg)}


def curves(svg: str) -> dict[tuple[str, str], list[Point]]:
    """Points along each drawn link, by its ends."""
    found: dict[tuple[str, str], list[Point]] = {}
    for *numbers, _, source, target, _ in PATH.findall(svg):
        x0, y0, x1, y1, x2, y2 = map(float, numbers)
        steps = [step / 40 for step in range(41)]
        found[source, target] = [
            (
                (1 - t) ** 2 * x0 + 2 * t * (1 - t) * x1 + t * t * x2,
                (1 - t) ** 2 * y0 + 2 * t * (1 - t) * y1 + t * t * y2,
            )
            for t in steps
        ]
    return found


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", FABRICS)
def test_every_link_is_drawn_from_end_to_end_and_none_behind_another_box(
    tmp_path: Path, name: str
) -> None:
    svg = draw(cluster(tmp_path, name), None)
    drawn, placed = curves(svg), boxes(svg)
    edges, nodes = FABRICS[name]
    used = [(a, b) for a, b, _ in edges if a != f"node{nodes}"]
    assert sorted(drawn) == sorted(used)
    for ends, points in drawn.items():
        for end, (x, y) in zip(ends, (points[0], points[-1]), strict=True):
            left, top, width, height = placed[end]
            assert left - 0.2 <= x <= left + width + 0.2
            assert top - 0.2 <= y <= top + height + 0.2
        for other, (left, top, width, height) in placed.items():
            if other not in ends:
                assert not any(
                    left < x < left + width and top < y < top + height for x, y in points
                ), (ends, other)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ["ring", "dragonfly of 9"])
def test_no_two_links_lie_on_each_other(tmp_path: Path, name: str) -> None:
    drawn = curves(draw(cluster(tmp_path, name), None))
    for one, other in combinations(drawn.values(), 2):
        near = sum(min(abs(x - a) + abs(y - b) for a, b in other) < 1 for x, y in one)
        assert near <= 4  # where they cross, or meet at a box


def test_links_have_the_colours_of_their_load(tmp_path: Path) -> None:
    loads: Mapping[str, float] = {"s0->s1": 0.2, "s1->s0": 0.9, "s3->s1": 0.2}
    found = {
        (source, target): (colour, words)
        for *_, colour, source, target, words in PATH.findall(
            draw(cluster(tmp_path, "ring"), None, loads)
        )
    }
    assert found["s0", "s1"] == (BUSIEST, "100 GB/s, 90.0% busy")  # the busier direction
    assert found["s1", "s3"][1] == "100 GB/s, 20.0% busy"
    assert found["s3", "s2"][1] == "100 GB/s, 0.0% busy"
    assert len({colour for colour, _ in found.values()}) == 3


@pytest.mark.one_commit_in(6)
def test_the_page_of_a_run_shows_the_busy_links_of_a_dragonfly(tmp_path: Path) -> None:
    links = written(tmp_path / "links.csv", dragonfly(3, 3))
    scenario = tmp_path / "run.toml"
    scenario.write_text(
        f"""
title = "on a dragonfly"
[model]
layers = 4
hidden_size = 2048
attention_heads = 16
sequence_length = 1024
vocab_size = 8192
[cluster]
node = "dgx_h100"
fabric = "{links}"
nodes = 9
[zero]
stage = 3
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
precision = "bf16"
""",
        "utf-8",
    )
    page = tmp_path / "page.html"
    assert answer(["run", str(scenario), "--no-check", "--report", str(page)]) == 0
    found = {
        (source, target): colour
        for *_, colour, source, target, _ in PATH.findall(page.read_text("utf-8"))
    }
    assert len(found) == len(dragonfly(3, 3))
    # A ring through all nodes leaves each group for the next one over its one link of 50 GB/s.
    busiest = {ends for ends, colour in found.items() if colour == BUSIEST}
    assert busiest == {("g0s0", "g1s0"), ("g0s1", "g2s0"), ("g1s1", "g2s1")}


def test_the_command_draws_a_list_of_links(tmp_path: Path) -> None:
    links, picture = written(tmp_path / "links.csv", dragonfly(3, 3)), tmp_path / "picture.svg"
    words = ["topology", "dgx_h100", "--fabric", str(links), "--nodes", "9"]
    assert answer([*words, "--draw", str(picture)]) == 0
    assert len(PATH.findall(picture.read_text("utf-8"))) == len(dragonfly(3, 3))
