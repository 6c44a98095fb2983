"""A GPU and a node of one's own: six numbers and five, with no source, wherever a name is taken."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.launch import run
from zsim.api.scenario import load
from zsim.api.shipped import installed, part_of_kind, template_text
from zsim.cli.main import answer
from zsim.cluster.cluster import ClusterError, Gpu
from zsim.cluster.files import Part, TopologyError
from zsim.cluster.files.gpu import OVERHEADS, GpuTable
from zsim.cluster.profile.host_launch import EAGER
from zsim.dtype import DType
from zsim.files.installed import find, fitted_for, part_names, part_text, topology, usual_nodes
from zsim.mistake import MistakeError
from zsim_plan.answer.best_question import question_of

TERA = 10**12
TINY = {"cluster.topology": None, "cluster.fabric": "single_switch", "cluster.nodes": 1}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Return the template of a GPU as a file."""
    path = tmp_path / "Mine.toml"
    path.write_text(template_text("gpu"), "utf-8")
    return path


def test_the_template_of_a_gpu_is_six_numbers(mine: Path) -> None:
    table = tomllib.loads(mine.read_text("utf-8"))
    rates = table.pop("rates")
    assert set(table) == {"name", "memory", "memory_bandwidth", "link", "power"}
    assert [list(rate) for rate in rates.values()] == [["peak"], ["peak"]]


def test_what_a_data_sheet_lacks_follows_from_rules_that_are_told(mine: Path) -> None:
    cluster = topology(str(mine), None, 1)
    gpu, cited = cluster.gpu, dict(cluster.cites)
    assert gpu.rate(DType.BF16).matmul == pytest.approx(0.75 * 989 * TERA)
    assert gpu.rate(DType.FP16).matmul == gpu.rate(DType.BF16).matmul
    assert gpu.rate(DType.FP32).peak == pytest.approx(989 * TERA / 16)
    assert gpu.overheads == OVERHEADS
    assert "three quarters" in cited["gpu.rates.bf16.matmul"]
    assert {"gpu.overheads", "gpu.rates.fp32", "switch", "switch.latency", "nic"} <= set(cited)
    assert all("rule of zsim" in cited[key] for key in ("gpu.overheads", "nic", "switch.latency"))


def test_the_template_of_a_node_is_five_numbers_around_any_gpu(mine: Path, tmp_path: Path) -> None:
    text = template_text("node").replace("h100_sxm5_80gb", str(mine))
    node = tmp_path / "node.toml"
    node.write_text(text, "utf-8")
    numbers = re.findall(r"^\w+ = .*\d", text, re.MULTILINE)
    assert len([each for each in numbers if not each.startswith("gpu =")]) == 5
    cluster = topology(str(node), "rail_optimized", 2)
    assert (cluster.gpu.name, cluster.ranks) == ("Mine", 16)


def test_a_file_stands_wherever_the_name_of_a_gpu_does(mine: Path) -> None:
    eight = gpu_fleet(f"8x{mine}")
    assert (eight.gpus, eight.cluster.gpu.name, eight.power_w) == (8, "Mine", 700)
    in_mesh = gpu_fleet("8xmi300x", str(mine))
    assert in_mesh.tables["cluster"] == {
        "node": "azure_nd_mi300x_v5",
        "fabric": "rail_optimized",
        "gpu": str(mine),
    }
    asked = question_of("gpt2", "8xmi300x", [f"cluster.gpu={mine}", "model.sequence_length=1024"])
    assert asked.fleet.cluster.gpu.name == "Mine"
    assert asked.power_w == 700
    with pytest.raises(MistakeError, match="must be at most 8, or a multiple of it"):
        gpu_fleet(f"12x{mine}")


def test_six_numbers_simulate_and_state_no_error(mine: Path) -> None:
    for changes in (
        {"cluster.node": str(mine)},
        {"cluster.node": "hgx_h20", "cluster.gpu": str(mine)},
    ):
        found = run(load("tiny", {**TINY, **changes}), check=False)
        assert found.step_time_s is not None
        assert found.recorded.error is None
        assert found.error.startswith("unknown: ")
        assert "Mine" in found.error


WRONG = {
    "no link": ('link = "450 GB/s"', "", "{}: link: missing; give the bandwidth to the other GPUs"),
    "no memory": ('memory = "80 GB"', "", "{}: memory: missing"),
    "bits": ("450 GB/s", "450 Gb/s", "{}: link: '450 Gb/s' is not a quantity such as '450 GB/s'"),
    "a bare number": ('"700 W"', "700", "{}: power: 700 is not a quantity with its unit"),
    "a key": ("link =", "lnk =", "{}: lnk: unknown key; did you mean link? allowed: "),
}


@pytest.mark.parametrize(("old", "new", "why"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_of_a_gpu_is_one_line(mine: Path, old: str, new: str, why: str) -> None:
    mine.write_text(template_text("gpu").replace(old, new), "utf-8")
    with pytest.raises(TopologyError) as caught:
        topology(str(mine), "single_switch", 1)
    assert str(caught.value).startswith(why.format(mine))
    assert "\n" not in str(caught.value)


def test_a_file_with_little_of_a_gpu_is_read_as_one(mine: Path) -> None:
    mine.write_text('name = "Mine"\nmemory = "80 GB"\n', "utf-8")
    with pytest.raises(MistakeError, match=r"Mine\.toml: memory_bandwidth, rates: missing$"):
        gpu_fleet(f"8x{mine}")


@given(
    half=st.integers(1, 10_000),
    fp8=st.none() | st.integers(1, 20_000),
    has_bf16=st.booleans(),
    fp32=st.none() | st.integers(1, 200),
)
def test_rules_keep_rates_below_their_peaks(
    half: int, fp8: int | None, has_bf16: bool, fp32: int | None
) -> None:
    peaks = {"bf16" if has_bf16 else "fp16": half, "fp8": fp8, "fp32": fp32}
    rates = {name: {"peak": f"{peak} TFLOP/s"} for name, peak in peaks.items() if peak}
    table = {"name": "any", "memory": "1 GB", "memory_bandwidth": "1 GB/s", "rates": rates}
    read = GpuTable.model_validate(table)
    gpu = read.gpu()
    assert isinstance(gpu, Gpu)
    for rate in gpu.rates:
        assert 0 < rate.matmul <= rate.peak
        assert 0 < rate.elementwise <= rate.peak
    assert {DType.FP16, DType.FP32, DType.FP64} <= {rate.dtype for rate in gpu.rates}
    ruled = {key.split(".")[2] for key, _ in read.rules() if key.startswith("gpu.rates.")}
    assert {str(rate.dtype) for rate in gpu.rates} == ruled


@pytest.mark.parametrize(
    "text",
    [
        *("8xmi300x", "8xmi325x", "8xmi355x", "8xb300", "72xgb300", "8xGH200", "8xh20", "8xh800"),
        *("8xh100_pcie", "8xh100_nvl", "8xa100_pcie", "8xl40s", "8xl4", "8xa10g", "8xa40", "8xt4"),
        *("8x3090", "8x5090", "8xrtx_pro_6000", "8xv100_16gb", "8xv100_32gb"),
    ],
)
def test_gpus_of_data_sheets_are_found_by_the_words_that_people_use(text: str) -> None:
    fleet = gpu_fleet(text)
    assert fleet.gpus == int(text.partition("x")[0])
    assert fleet.power_w


def test_every_gpu_is_found_by_the_name_of_its_file() -> None:
    assert set(part_names(Part.GPU)) <= set(usual_nodes())
    for nodes in usual_nodes().values():
        assert len({find(Part.NODE, node)["gpu"] for node in nodes}) == 1


def test_gpus_of_data_sheets_are_marked_in_the_list() -> None:
    lines = [line.split(maxsplit=1) for line in installed("gpus").text().splitlines()[1:]]
    marked = {name for name, *note in lines if note == ["data sheet only"]}
    known = {name for name in part_names(Part.GPU) if "evidence" in find(Part.GPU, name)}
    assert marked == known
    assert {name for name, *_ in lines} == set(part_names(Part.GPU))
    assert 0 < len(marked) < len(lines)


def test_a_gpu_of_a_data_sheet_has_the_launch_costs_of_others_and_says_so() -> None:
    for node in ("l40s_8", "azure_nd_mi300x_v5"):
        assert topology(node, "single_switch", 1).gpu.launch == EAGER
        assert "gpu.launch" in dict(topology(node, "single_switch", 1).cites)
    found = run(load("tiny", {**TINY, "cluster.node": "l40s_8"}), check=False)
    assert "; kernels are launched as fast as on the host of an A100" in found.error
    timed = run(load("tiny", {**TINY, "cluster.node": "dgx_a100"}), check=False)
    assert "launched" not in timed.error


def test_so_many_gpus_take_the_smallest_node_that_holds_them() -> None:
    asked = {"4x4090": "workstation_4x4090", "8x4090": "server_8x4090", "16x4090": "server_8x4090"}
    assert {text: gpu_fleet(text).node for text in asked} == asked


def test_constants_of_a_module_are_not_taken_for_a_card() -> None:
    assert fitted_for(topology("h100_pcie_8", "single_switch", 1)) == ()
    assert fitted_for(topology("a100_pcie_8", "single_switch", 1)) == ()
    swapped = topology("l40s_8", "single_switch", 1, "h100_sxm5_80gb")
    assert fitted_for(swapped) == ("compute.profile=h100_2026",)  # those of links are of NVLink


def test_a_mesh_of_cards_on_pcie_alone_has_no_slot_to_leave_by(tmp_path: Path) -> None:
    node = tmp_path / "node.toml"
    text = template_text("node").replace("# nvswitch", "nvswitch")
    node.write_text(text[: text.index("[pcie]")], "utf-8")
    with pytest.raises((TopologyError, ClusterError), match=r"nvswitch: false needs \[pcie\]"):
        topology(str(node), "single_switch", 1)


def test_show_prints_templates_and_parts_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {
        ("gpu", "--template"): template_text("gpu"),
        ("node", "--template"): template_text("node"),
        ("gpu", "mi300x_192gb"): part_text(Part.GPU, "mi300x_192gb"),
    }
    for words, text in shown.items():
        assert answer(["show", *words]) == 0
        assert capsys.readouterr().out == text
    refused: tuple[tuple[tuple[str, ...], str], ...] = (
        (("fabric", "--template"), "zsim: --template: 'fabric' must be one of gpu, node"),
        (("gpu", "mi300x_192gb", "--template"), "zsim: --template: 'mi300x_192gb': cannot be"),
        (
            ("gpus", "l4_24gb"),
            "zsim: name: 'gpus': did you mean gpu? It must be one of topology, node, fabric, gpu",
        ),
    )
    for wrong, why in refused:
        assert answer(["show", *wrong]) != 0
        assert capsys.readouterr().err.startswith(why)
    assert part_of_kind("gpu", "mi300x") == part_text(Part.GPU, "mi300x_192gb")
    with pytest.raises(MistakeError, match="did you mean mi300x_192gb"):
        part_of_kind("gpu", "mi300x_192g")
