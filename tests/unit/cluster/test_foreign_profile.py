"""Fitted constants of one GPU on another: no error is stated, and the GPU is named first."""

import tomllib
from pathlib import Path

import pytest

from zsim.api.launch import run
from zsim.api.run_result import RunResult
from zsim.api.scenario import load
from zsim.cluster.files import Part
from zsim.cluster.foreign_profile import is_for
from zsim.files.installed import fitted_kernels, network_profiles, part_names, part_text
from zsim.prediction.evidence import judged_runs

ONE_NODE = {"zero.emulate": "fsdp2", "train.steps": 1, "cluster.nodes": 1}
ON_H100 = {
    **ONE_NODE,
    "cluster.topology": None,
    "cluster.node": "dgx_h100",
    "cluster.fabric": "single_switch",
    "compute.profile": "h100",
    "network.profile": "h100",
    "model.layers": 2,
}


def gpu_of(node: str) -> str:
    parts = Part.NODE if node in part_names(Part.NODE) else Part.SYSTEM
    table = tomllib.loads(part_text(parts, node))
    if "gpu" not in table:
        return gpu_of(table["node"])
    return str(tomllib.loads(part_text(Part.GPU, table["gpu"]))["name"])


def ran(**changes: object) -> RunResult:
    return run(load("llama2_7b", {**ON_H100, **changes}), check=False)


@pytest.fixture
def own_gpu(tmp_path: Path) -> dict[str, object]:
    """Return settings for a node of GPUs that do not ship, but are as fast as an H100."""
    gpu, node = tmp_path / "mi300x.toml", tmp_path / "node.toml"
    h100 = part_text(Part.GPU, "h100_sxm5_80gb")
    gpu.write_text(h100.replace('"H100-SXM5-80GB"', '"MI300X-192GB"'), "utf-8")
    dgx = part_text(Part.NODE, "dgx_h100")
    node.write_text(dgx.replace('"h100_sxm5_80gb"', f'"{gpu}"'), "utf-8")
    return {"cluster.node": str(node)}


def test_a_run_with_constants_of_another_gpu_states_no_error(own_gpu: dict[str, object]) -> None:
    own, other = ran(), ran(**own_gpu)
    assert own.recorded.error is not None
    assert not [line for name, line in own.facts() if name == "warning"]
    assert other.step_time_s == own.step_time_s
    assert other.recorded.error is None
    assert other.error.startswith(
        "unknown: GPU MI300X-192GB (compute.profile = h100 and "
        "network.profile = h100 are of another GPU)"
    )
    assert [line for name, line in other.facts() if name == "warning"] == [
        f"{key} = h100 is of another GPU than MI300X-192GB; --set {key}=none takes published rates"
        for key in ("compute.profile", "network.profile")
    ]


def test_constants_of_another_network_are_named_where_kernels_are_of_the_gpu() -> None:
    found = ran(**{"network.profile": "a100/azure_nd"})
    assert found.recorded.error is None
    assert "(network.profile = a100/azure_nd is of another GPU)" in found.error
    assert ("more accurate", "--set network.profile=h100, from measurements") in found.facts()
    alone = ran(**{"network.profile": "v100", "compute.profile": None})
    assert "GPU H100-SXM5-80GB (network.profile = v100 is of another GPU)" in alone.error


def test_constants_of_one_system_name_it() -> None:
    assert "constants" not in ran().error
    one = ran(**{"network.profile": "h100/aws_p5"})
    assert one.error.endswith("; collectives have constants of one system, aws_p5")


def test_a_schedule_in_a_file_keeps_the_name_of_its_constants(
    own_gpu: dict[str, object], tmp_path: Path
) -> None:
    loaded = load("llama2_7b", {**ON_H100, **own_gpu})
    loaded.write_schedule(tmp_path / "schedule.json")
    found = run(tmp_path / "schedule.json", check=False)
    assert found.error == run(loaded, check=False).error


def test_every_judged_run_has_constants_of_its_own_gpu() -> None:
    asked = ("cluster.topology", "cluster.node", "compute.profile", "network.profile")
    found = {tuple(run.settings.get(key) for key in asked) for run in judged_runs()}
    assert len(found) > 10
    for topology, node, *profiles in found:
        gpu = gpu_of(str(node or topology))
        assert all(is_for(str(name), gpu) for name in profiles if name)


def test_every_profile_that_ships_is_for_one_kind_of_gpu() -> None:
    gpus = [gpu_of(node) for node in part_names(Part.NODE)]
    for name in {*fitted_kernels(), *network_profiles()} - {"unnamed", "gh200", "h20"}:
        kinds = {gpu.split("-")[0] for gpu in gpus if is_for(name, gpu)}
        assert len(kinds) == 1, (name, kinds)


@pytest.mark.parametrize(
    ("profile", "gpu", "fits"),
    [
        ("h100", "My H100 (SXM)", True),
        ("h100", "My H100 (PCIe)", False),
        ("a100", "A100-PCIe-80GB", False),
        ("h100_2026", "H100-SXM5-80GB", True),
        ("h100/aws_p5", "H100-SXM5-80GB", True),
        ("v100_timed", "V100-SXM3-32GB", True),
        ("h100_hbm2e", "H100-SXM5-80GB", False),
        ("h100", "H200-SXM-141GB", False),
        ("b200", "GB200-186GB", False),
        ("a100", "RTX-4090-24GB", False),
    ],
)
def test_constants_are_for_gpus_whose_name_has_all_parts_of_theirs(
    profile: str, gpu: str, *, fits: bool
) -> None:
    assert is_for(profile, gpu) is fits
