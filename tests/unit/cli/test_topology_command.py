"""`zsim topology`: what it says of clusters, what it draws, what it refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from zsim.cli.main import answer

ROOT = Path(__file__).parents[3]
Json = Any
"""A JSON value: its shape is what the tests look at."""

Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run `zsim topology`; exit code, standard output, standard error."""

    def asked(*words: str | Path | int) -> tuple[int, str, str]:
        code = answer(["topology", *map(str, words)])
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return asked


@pytest.fixture
def described(ask: Ask) -> Callable[..., Json]:
    """The JSON of a description."""

    def found(*words: str | Path | int) -> Json:
        code, out, err = ask(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return found


LINKS = """source,target,bandwidth_per_direction,latency
node0,left,200 GB/s,1 us
node1,left,200 GB/s,1 us
node2,right,200 GB/s,1 us
node3,right,200 GB/s,1 us
node4,right,200 GB/s,1 us
left,right,100 GB/s,260 ns
"""


def test_one_node_of_an_explicit_fabric_can_be_described(
    described: Callable[..., Json], tmp_path: Path
) -> None:
    (tmp_path / "two.csv").write_text(LINKS, "utf-8")
    found = described("dgx_a100", "--fabric", tmp_path / "two.csv")
    assert (found["nodes"], found["gpus"]) == (1, 8)
    assert found["narrowest_cut"]["where"] == "between two halves"


def test_a_cluster_is_described_in_a_screen(ask: Ask) -> None:
    code, out, err = ask("dgx_h100", "--fabric", "rail_optimized", "--nodes", 128)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "dgx_h100 on rail_optimized"
    assert len(lines) <= 15
    assert all(len(line) <= 100 for line in lines)
    for words in (
        "128 of 8 GPUs: 1,024 in all",
        "32 nodes below a leaf, 1 : 1",
        "leaf to spine: 32 x 1.6 TB/s, 260 ns each way",
        "25.6 TB/s each way for 512 GPUs, 50 GB/s for each",
        "out of a node of 8 GPUs: 400 GB/s each way for 8 GPUs, 50 GB/s for each",
    ):
        assert words in out


def test_the_json_counts_links_and_cuts_in_bytes_and_seconds(
    described: Callable[..., Json],
) -> None:
    found = described("dgx2_infiniband", "--nodes", 25)
    assert (found["nodes"], found["gpus"], found["fabric"]) == (25, 400, "single_switch")
    nics = next(each for each in found["links"] if each["source"] == "NIC")
    assert nics["count"] == 200
    assert nics["bytes_per_s"] == 12_500_000_000
    assert nics["latency_s"] == pytest.approx(3.1e-6)
    assert found["narrowest_cut"]["bytes_per_s"] == 100 * 10**9  # 800 Gb/s out of a node
    assert found["bisection_bytes_per_s"] == 12 * 100 * 10**9
    assert found["host"]["memory_bytes"] == 1_500 * 10**9
    assert found["drives"] == {
        "count": 8,
        "capacity_bytes": 3_840 * 10**9,
        "read_bytes_per_s": 3_500_000_000,
        "write_bytes_per_s": 3_500_000_000,
        "latency_s": pytest.approx(146e-6),
        "stripe_bytes": 2**19,
        "endurance_bytes": 7 * 10**15,
    }
    assert found["host"]["cpu"]["cores_per_socket"] == 24
    assert found["copies"]["root_ports"] == 4
    assert found["copies"]["to_all_gpus_bytes_per_s"] == 48 * 10**9  # ZeRO-Infinity, figure 2b
    boards = next(each for each in found["cuts"] if "board" in each["where"])
    assert boards["bytes_per_s"] == 1250 * 10**9  # NVSwitch to the other board, and half the NICs
    assert all(found["sources"].values())


def test_drives_are_described_as_far_as_they_are_known(ask: Ask) -> None:
    def words(node: str) -> str:
        return " ".join(ask(node)[1].split())

    each = "drives 8 of 1 TB, each read at 2.7 GB/s and written at 2.7 GB/s NICs"
    assert each in words("p4d")
    assert "each read at 6.25 GB/s and written at 3.8 GB/s NICs" in words("dgx_a100")
    assert "drives 8 of 3.84 TB, of unknown rates NICs" in words("p5")
    assert "drives none known NICs" in words("hgx_b200")
    assert " host 2 TB" not in words("hgx_b200")


def test_what_all_gpus_of_a_node_copy_together_is_described(ask: Ask) -> None:
    out = " ".join(ask("dgx2")[1].split())
    assert "12 GB/s to a GPU, 13.1 GB/s back, 8.59 GB/s at once; 48 GB/s to a node" in out
    assert "2 x 24 cores, Adam at 109 GB/s, casts at 70.9 GB/s" in out
    assert "links root port to host: 4 x 15.8 GB/s each way" in out


def test_the_picture_of_a_node_has_what_its_gpus_copy_together(ask: Ask, tmp_path: Path) -> None:
    drawn = tmp_path / "node.svg"
    assert ask("dgx2", "--draw", drawn)[0] == 0
    words = {each.text for each in ElementTree.parse(drawn).iter() if each.text}
    assert "copies to all GPUs: 48 GB/s, 4 root ports" in words
    assert "drives: 8 of 3.84 TB" in words
    assert any("read 28 GB/s, written 28 GB/s" in each for each in words)


def test_what_is_oversubscribed_is_where_the_narrowest_cut_is(
    described: Callable[..., Json], tmp_path: Path
) -> None:
    fabric = tmp_path / "narrow.toml"
    text = (ROOT / "topologies/zsim_topologies/fabrics/fat_tree_2.toml").read_text("utf-8")
    fabric.write_text(text.replace("oversubscription = 1", 'oversubscription = "5/2"'), "utf-8")
    wide = described("dgx_a100", "--fabric", "fat_tree_2", "--nodes", 64)
    narrow = described("dgx_a100", "--fabric", fabric, "--nodes", 64)
    assert wide["narrowest_cut"]["where"] == "out of a node of 8 GPUs"
    assert narrow["narrowest_cut"]["where"] == "out of the 4 nodes below a leaf"
    assert narrow["narrowest_cut"]["bytes_per_s_per_gpu"] == pytest.approx(25e9 * 2 / 5)
    assert narrow["bisection_bytes_per_s"] == pytest.approx(wide["bisection_bytes_per_s"] * 2 / 5)


def test_a_rack_of_72_is_narrow_only_towards_other_racks(described: Callable[..., Json]) -> None:
    one = described("gb200_nvl72", "--nodes", 18)
    two = described("gb200_nvl72", "--nodes", 36, "--fabric", "fat_tree_2")
    assert one["narrowest_cut"]["bytes_per_s_per_gpu"] == 900e9
    assert two["narrowest_cut"]["where"] == "out of an NVSwitch domain of 72 GPUs"
    assert two["narrowest_cut"]["bytes_per_s_per_gpu"] == 50e9


def test_the_narrowest_cut_of_an_irregular_fabric_is_found(
    described: Callable[..., Json], tmp_path: Path
) -> None:
    path = tmp_path / "links.csv"
    path.write_text(LINKS, "utf-8")
    found = described("dgx_a100", "--fabric", path, "--nodes", 5)
    assert found["narrowest_cut"] == {
        "where": "between node0, node1 (2 of 5 nodes) and the others",
        "gpus": 16,
        "bytes_per_s": 100 * 10**9,
        "bytes_per_s_per_gpu": 6.25e9,
    }
    fewer = described("dgx_a100", "--fabric", path, "--nodes", 4)  # node4 is not there
    assert next(each for each in fewer["links"] if each["source"] == "node")["count"] == 4


def test_one_gpu_has_nothing_to_cut(described: Callable[..., Json], tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    text = (ROOT / "topologies/zsim_topologies/nodes/dgx_h100.toml").read_text("utf-8")
    path.write_text(text.replace("gpus = 8", "gpus = 1"), "utf-8")
    found = described(path, "--draw", tmp_path / "one.svg")
    assert (found["gpus"], found["cuts"], found["narrowest_cut"]) == (1, [], None)


@pytest.mark.parametrize(
    ("node", "fabric", "nodes"),
    [
        ("dgx2", "single_switch", 25),
        ("dgx2", "single_switch", 1),
        ("dgx_h100", "rail_optimized", 128),
        ("gb200_nvl72", "fat_tree_3", 4000),
        ("p5", "rail_only", 2),
        ("p4d", "LINKS", 5),
    ],
)
def test_the_drawing_is_svg_with_what_matters(
    ask: Ask, tmp_path: Path, node: str, fabric: str, nodes: int
) -> None:
    if fabric == "LINKS":
        fabric = str(tmp_path / "links.csv")
        Path(fabric).write_text(LINKS, "utf-8")
    path = tmp_path / "cluster.svg"
    code, _, err = ask(node, "--fabric", fabric, "--nodes", nodes, "--draw", path)
    assert (code, err) == (0, "")
    root = ElementTree.parse(path).getroot()
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    words = [text.text or "" for text in root.findall("{*}text")]
    assert f"{node} on {fabric}" in words
    assert any(text.startswith("narrowest cut: ") for text in words)
    assert any("NVSwitch" in text for text in words)
    for box in root.findall("{*}rect"):
        if box.attrib["width"] != "100%":
            assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
            assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_png_is_made_by_cairosvg(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("cairosvg")
    vars(fake)["svg2png"] = lambda bytestring, scale: b"PNG" + bytestring[:4]
    monkeypatch.setitem(sys.modules, "cairosvg", fake)
    path = tmp_path / "cluster.png"
    assert ask("dgx_h100", "--draw", path)[0] == 0
    assert path.read_bytes() == b"PNG<svg"
    code, _, err = ask("dgx_h100", "--draw", tmp_path / "none" / "cluster.png")
    assert (code, err) == (
        2,
        f"zsim: --draw: {path.parent}/none/cluster.png: {path.parent}/none is no folder\n",
    )


@pytest.mark.matrix(6)
@pytest.mark.parametrize(("ending", "begin"), [("png", b"\x89PNG\r\n"), ("pdf", b"%PDF-1.")])
@pytest.mark.parametrize(
    "command",
    [
        ("topology", "dgx_h100", "--draw"),
        ("run", "tiny", "--timeline"),
        ("run", "tiny", "--picture"),
    ],
)
def test_a_picture_is_an_image_where_cairosvg_is_installed(
    command: tuple[str, ...], ending: str, begin: bytes, tmp_path: Path
) -> None:
    pytest.importorskip("cairosvg", exc_type=ImportError)
    path = tmp_path / f"picture.{ending}"
    assert answer([*command, str(path)]) == 0
    assert path.read_bytes().startswith(begin)


def test_without_cairosvg_one_line_says_what_to_install(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    path = tmp_path / "cluster.png"
    code, out, err = ask("dgx_h100", "--draw", path)
    assert (code, out, path.exists()) == (2, "", False)
    assert f"--draw: {path}: PNG needs cairosvg (pip install 'zsim[draw]')" in err


REFUSED: dict[tuple[str, ...], str] = {
    (
        "abacus",
    ): "name: 'abacus' must be a file (.toml, .xml), or a name that zsim list topologies or ",
    ("dgx_h100", "--fabric", "torus"): "'torus' must be one of fat_tree_2, fat_tree_3, rail_only",
    (
        "dgx9",
        "--fabric",
        "fat_tree_2",
    ): "'dgx9': did you mean dgx2? It must be one of a100_pcie_8, a100_pcie_8_40gb, ",
    (
        "dgx2_infiniband",
        "--fabric",
        "fat_tree_2",
    ): "--fabric: dgx2_infiniband is a node on a fabric",
    ("dgx_h100", "--draw", "x.gif"): "--draw: x.gif: must end in .svg, .png or .pdf",
    ("dgx_h100", "--nodes", "0"): "Invalid value for '--nodes': '0' must be a whole number, at",
    ("none.toml",): "none.toml: no such file or directory",
    ("none.xml",): "none.xml: no such file or directory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_one_line(ask: Ask, words: tuple[str, ...]) -> None:
    code, out, err = ask(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"zsim: {REFUSED[words]}")
    assert err.count("\n") == 1


def test_the_picture_in_the_documentation_is_what_the_command_draws(
    ask: Ask, tmp_path: Path
) -> None:
    path = tmp_path / "drawn.svg"
    assert ask("dgx_h100", "--fabric", "rail_optimized", "--nodes", 128, "--draw", path)[0] == 0
    shown = (ROOT / "docs" / "dgx_h100_rail_optimized.svg").read_text("utf-8")
    assert path.read_text("utf-8") == shown


def test_a_topology_is_changed_by_the_keys_of_a_scenario(described: Callable[..., Json]) -> None:
    words = ("dgx_h100", "--fabric", "rail_optimized", "--nodes", "128")
    plain = described(*words)
    changed = described(*words, "--set", "cluster.oversubscription=4", "--set", "cluster.nodes=64")
    assert changed["nodes"] == 64
    assert changed["tiers"][0]["oversubscription"] == 4
    assert plain["tiers"][0]["oversubscription"] == 1
    assert changed["name"] == (
        f"{plain['name']}, with cluster.oversubscription = 4, cluster.nodes = 64"
    )
    assert described("dgx_h100", "--set", "cluster.gpu_memory=40 GB")["gpu_memory_bytes"] == 40e9


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("zero.stage=3", "zero: unknown key; allowed: cluster"),
        ("cluster.nods=3", "cluster.nods: unknown key; did you mean nodes? allowed: nodes, gpu"),
        ("cluster.gpu_memory=40 Gb", "cluster.gpu_memory: '40 Gb' must be a size such as"),
        ("cluster.oversubscription=2", "cluster.oversubscription: 2 is for a fabric with leaves"),
        ("cluster", "--set: 'cluster' must be KEY=VALUE"),
    ],
)
def test_a_setting_that_a_topology_does_not_have_is_one_line(
    ask: Ask, setting: str, why: str
) -> None:
    code, out, error = ask("dgx_h100", "--set", setting)
    assert (code, out) == (2, "")
    assert error.startswith(f"zsim: {why}")
