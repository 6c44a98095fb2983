"""GPUs without fitted kernels have the efficiencies of a measured GPU, scaled to the data sheet."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.launch import run
from zsim.api.run_result import RunResult
from zsim.api.scenario import load
from zsim.cluster.cluster import Gpu
from zsim.cluster.files import Part
from zsim.cluster.profile.kernels import KernelProfileError
from zsim.compute.roofline import kernel_ps
from zsim.dtype import DType
from zsim.files.installed import (
    fitted_for,
    part_names,
    part_text,
    topology,
)
from zsim.files.nearest_gpu import borrowed_for, kernel_profile
from zsim.mistake import MistakeError
from zsim.model.kernel import Kernel, KernelKind
from zsim_plan.answer.best_question import question_of

H100 = "h100_sxm5_80gb"
RATE = re.compile(r'"([0-9.]+) (TFLOP/s|GB/s)"')

SMALL = {
    "zero.emulate": "fsdp2",
    "train.steps": 1,
    "cluster.topology": None,
    "model.layers": 1,
    "train.gradient_accumulation_steps": 1,
}

SIX = """name = "Six"
memory = "80 GB"
memory_bandwidth = "3350 GB/s"
link = "450 GB/s"
power = "700 W"
rates.bf16.peak = "989.4 TFLOP/s"
rates.fp8.peak = "1978.9 TFLOP/s"
"""


def sheet(folder: Path, factor: int = 1) -> str:
    """Return the path of H100's data sheet under another name, with faster rates."""
    text = part_text(Part.GPU, H100).replace('"H100-SXM5-80GB"', '"Copy"')
    path = folder / f"copy_{factor}.toml"
    faster = RATE.sub(lambda found: f'"{float(found[1]) * factor:g} {found[2]}"', text)
    path.write_text(faster, "utf-8")
    return str(path)


def given_by_best(gpus: str, gpu: str | None = None) -> dict[str, object]:
    """Return the settings that `best` gives a scenario of these GPUs."""
    tables = gpu_fleet(gpus, gpu).tables
    return {f"{name}.{key}": each for name, keys in tables.items() for key, each in keys.items()}


def ran(changes: Mapping[str, object]) -> RunResult:
    return run(load("llama2_7b", {**SMALL, "cluster.nodes": 1, **changes}), check=False)


def test_a_copy_of_a_measured_data_sheet_is_as_fast_and_twice_its_rates_at_most_twice(
    tmp_path: Path,
) -> None:
    own = ran(given_by_best("8xh100"))
    copy = ran(given_by_best("8xh100", sheet(tmp_path)))
    assert copy.step_time_s == own.step_time_s
    assert copy.recorded.error is None
    assert copy.error == (
        "unknown: GPU Copy (compute.profile = h100_2026 and network.profile = h100 are of another "
        "GPU); data sheet only: kernels as efficient as on H100, scaled to the data sheet; not "
        "measured on Copy"
    )
    twice = ran(given_by_best("8xh100", sheet(tmp_path, 2)))
    assert own.step_time_s / 2 <= twice.step_time_s < own.step_time_s


def timed(gpu: Gpu, profile: str) -> Gpu:
    return gpu.timed_by(kernel_profile(profile))


SHEET = topology("dgx_h100", "single_switch", 1).gpu
EXTENTS = st.integers(1, 300).map(lambda each: 64 * each)


@settings(max_examples=25, deadline=None)
@given(rows=EXTENTS, columns=EXTENTS, inner=EXTENTS, factor=st.integers(1, 8))
def test_kernels_gain_at_most_the_ratio_of_the_rates(
    rows: int, columns: int, inner: int, factor: int
) -> None:
    rates = tuple(
        replace(
            each,
            peak=factor * each.peak,
            matmul=factor * each.matmul,
            elementwise=factor * each.elementwise,
        )
        for each in SHEET.rates
    )
    faster = replace(
        SHEET, name="Fast", memory_bytes_per_s=factor * SHEET.memory_bytes_per_s, rates=rates
    )
    product = Kernel(
        kind=KernelKind.MATMUL,
        dtype=DType.BF16,
        flops=2 * rows * columns * inner,
        bytes=2 * (rows * inner + inner * columns + rows * columns),
        shape=(1, rows, columns, inner),
    )
    own_ps, fast_ps = (kernel_ps(product, timed(gpu, "h100_2026")) for gpu in (SHEET, faster))
    assert own_ps <= factor * (fast_ps + 1)
    assert fast_ps <= own_ps


def test_six_numbers_of_a_gpu_have_the_kernel_times_of_a_measured_one(tmp_path: Path) -> None:
    path = tmp_path / "six.toml"
    path.write_text(SIX, "utf-8")
    six, h100 = gpu_fleet(f"8x{path}"), gpu_fleet("8xh100")
    assert six.tables["compute"] == h100.tables["compute"]
    assert six.tables["network"] == h100.tables["network"]


@pytest.mark.parametrize(
    ("gpus", "profiles"),
    [
        ("8xl40s", {"compute.profile": "h100_2026"}),
        ("8xh100_pcie", {"compute.profile": "h100_2026"}),
        ("8xa100_pcie", {"compute.profile": "a100/a100_pcie_80gb"}),
        ("8xh20", {"compute.profile": "h100_2026", "network.profile": "h20"}),
        (
            "8xmi300x",
            {"compute.profile": "h100_2026/mi300x_192gb", "network.profile": "h100"},
        ),
    ],
)
def test_the_nearest_measured_gpu_gives_its_constants(gpus: str, profiles: dict[str, str]) -> None:
    found = given_by_best(gpus)
    assert {key: each for key, each in found.items() if key.endswith("profile")} == profiles


def test_a_file_names_the_nearest_measured_gpu(tmp_path: Path) -> None:
    path = Path(sheet(tmp_path))
    text = path.read_text("utf-8")
    path.write_text(text.replace('name = "Copy"', 'name = "Copy"\nnearest = "a100"'), "utf-8")
    assert given_by_best("8xh100", str(path))["compute.profile"] == "a100"
    path.write_text(text.replace('name = "Copy"', 'name = "Copy"\nnearest = "a1000"'), "utf-8")
    with pytest.raises(MistakeError, match=r"--gpus: gpu\.nearest: 'a1000': did you mean a100"):
        gpu_fleet("8xh100", str(path))


def test_a_gpu_with_fitted_kernels_borrows_nothing() -> None:
    fitted = 0
    for node in part_names(Part.NODE):
        cluster = topology(node, "single_switch", 1)
        own = dict(each.split("=") for each in fitted_for(cluster))
        other = dict(each.split("=") for each in borrowed_for(cluster))
        fitted += "compute.profile" in own
        assert bool(other) is ("compute.profile" not in own), node
        assert not set(own) & set(other)
    assert fitted


@pytest.mark.parametrize("said", ["a100", None])
def test_best_keeps_a_profile_that_the_user_names(said: str | None) -> None:
    asked = question_of("llama3_8b", "8xmi300x", {"compute.profile": said})
    assert asked.tables.get("compute", {}).get("profile") == said


def test_a_scenario_without_a_profile_is_timed_by_published_rates() -> None:
    plain = {"cluster.node": "azure_nd_mi300x_v5", "cluster.fabric": "single_switch"}
    found = ran({**plain, "compute.profile": None, "network.profile": None})
    assert found.job.cluster.gpu.kernels is None
    assert "times come from MI300X-192GB rates" in found.error


def test_products_reach_no_larger_a_fraction_than_the_largest_achieved_rate_allows() -> None:
    own, scaled = kernel_profile("h100_2026"), kernel_profile("h100_2026/mi300x_192gb")
    ratio = (668.4 / 1307.4) / (794.5 / 989.4)
    assert scaled.product == pytest.approx(ratio * own.product)
    assert scaled.flash2 is not None
    assert own.flash2 is not None
    assert scaled.flash2.forward == pytest.approx(ratio * own.flash2.forward)
    assert scaled.elementwise_forward == own.elementwise_forward
    assert kernel_profile(f"h100_2026/{H100}") == own
    assert kernel_profile("h100_2026/rtx_4090_24gb") == own  # it reaches more


def test_a_profile_for_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(KernelProfileError, match="mi300y"):
        kernel_profile("h100_2026/mi300y")


@pytest.mark.parametrize(
    ("gpus", "kernels", "links"),
    [
        ("8xb300", "b200/b300_sxm_288gb", "b200"),
        ("8xa10g", "a100", None),
        ("8x3090", "a100", None),
        ("4xt4", "v100", None),
        ("8xl40s", "h100_2026", None),
    ],
)
def test_a_gpu_has_the_constants_of_the_measured_one_that_its_file_names(
    gpus: str, kernels: str, links: str | None
) -> None:
    found = given_by_best(gpus)
    assert found["compute.profile"] == kernels
    assert found.get("network.profile") == links


@pytest.mark.parametrize("gpu", ["gb200", "gb300", "b200"])
def test_gpus_of_a_rack_have_constants_of_their_own(gpu: str) -> None:
    found = given_by_best(f"8x{gpu}")
    assert (found["compute.profile"], found["network.profile"]) == (gpu, gpu)


def test_a_run_says_whose_constants_its_collectives_have() -> None:
    told = ran(given_by_best("8xgb300")).text()
    assert "assumed" in told
    assert "collectives as on GB200; none of GB300 is published" in " ".join(told.split())
    assert "assumed" not in ran(given_by_best("8xgb200")).text()
