"""`[compute]` on the command line, constants that ship, and files that calibration writes."""

import csv
import json
import tomllib
from pathlib import Path

import pytest

from zsim.cli.main import answer
from zsim.cluster.profile.kernels import parse
from zsim.files.installed import fitted_for, fitted_kernels, scenarios, topology


def run(capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, object]:
    words = ["run", "gpt3_175b", "--no-check", "--json"]
    for setting in settings:
        words += ["--set", setting]
    assert answer(words) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_fitted_constants_change_times_and_what_is_to_be_trusted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, fitted = run(capsys), run(capsys, "compute.profile=h100")
    assert fitted["step_time_s"] != plain["step_time_s"]
    assert fitted["peak_allocated_bytes"] == plain["peak_allocated_bytes"]
    # 512 GPUs and 175 billion parameters are beyond what anybody published in such a table.
    assert "held-out runs of training on h100" in str(fitted["trust"])
    assert "outside the range fitted: runtime zsim's own" in str(fitted["trust"])
    assert "512 GPUs, 175,221,817,344 parameters;" in str(fitted["trust"])
    assert "rates" in str(plain["trust"])


FSDP = ("zero.emulate=fsdp1",)
NANOTRON = ("zero.emulate=nanotron", "zero.stage=1")
FLOAT8 = (*FSDP, "train.float8=rowwise", "train.compile=true")
FAULT = (*FSDP, "fault=[{kind='gpu', rank=1, factor=2}]")


@pytest.mark.parametrize(
    ("settings", "outside"),
    [
        (FSDP, ""),
        ((*FSDP, "cluster.nodes=1", "cluster.nics_per_node=1"), ""),  # no NIC is used
        ((), "runtime zsim's own"),
        (("zero.emulate=fsdp2",), "runtime FSDP2"),
        (NANOTRON, "runtime Nanotron"),
        ((*NANOTRON, "parallel.tensor=2"), "runtime Nanotron, tensor degree 2"),
        (
            (*NANOTRON, "parallel.tensor=2", "parallel.pipeline=4"),
            "runtime Nanotron, tensor degree 2, 4 stages of a pipeline",
        ),
        ((*FSDP, "parallel.replicate=2"), "2 replicas of the shards"),
        ((*FSDP, "parallel.context=2"), "context degree 2"),
        ((*FSDP, "train.precision=fp16"), "precision fp16"),
        (FLOAT8, "precision bf16 with rowwise float8"),
        ((*FSDP, "cluster.nics_per_node=4"), "4 NICs per node where rows had 8"),
        (FAULT, "faults"),
        ((*FSDP, "cluster.nodes=64"), "512 GPUs"),
    ],
)
def test_a_run_unlike_those_that_were_judged_says_in_what(
    capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], outside: str
) -> None:
    words = [word for each in settings for word in ("--set", each)]
    assert answer(["run", "llama2_7b", *words, "--no-check", "--json"]) == 0
    trust = json.loads(capsys.readouterr().out)["trust"]
    where = f"outside the range fitted: {outside};" if outside else "inside the range fitted;"
    assert f"this run is {where}" in trust


def test_a_run_on_published_link_speeds_is_unlike_those_that_were_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(scenarios()["llama2_7b"].replace('[network]\nprofile = "h100"', ""), "utf-8")
    words = ["run", str(path), "--set", "zero.emulate=fsdp1", "--no-check", "--json"]
    assert answer(words) == 0
    trust = json.loads(capsys.readouterr().out)["trust"]
    assert "outside the range fitted: collectives without fitted constants; link speeds" in trust


def on(node: str, fabric: str) -> str:
    """The text of llama2_7b on other nodes and another fabric."""
    cluster = f'node = "{node}"\nfabric = "{fabric}"'
    return scenarios()["llama2_7b"].replace('topology = "dgx_h100_infiniband"', cluster)


def test_a_fabric_unlike_those_that_were_judged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, links = tmp_path / "run.toml", tmp_path / "links.csv"
    columns = "source,target,bandwidth_per_direction,latency\n"
    edges = "".join(f"node{node},leaf{node % 2},400 GB/s,1 us\n" for node in range(4))
    links.write_text(f"{columns}{edges}leaf0,leaf1,400 GB/s,1 us\n", "utf-8")
    slow = ("zero.emulate=deepspeed", "cluster.nics_per_node=1", "cluster.oversubscription=64")
    for fabric, settings, outside in (
        (
            "fat_tree_2",
            slow,
            "runtime DeepSpeed, 1 NIC per node where rows had 8, oversubscription 64",
        ),
        (str(links), FSDP, "a fabric of listed links"),
    ):
        path.write_text(on("dgx_h100", fabric), "utf-8")
        words = [word for each in settings for word in ("--set", each)]
        assert answer(["run", str(path), *words, "--no-check", "--json"]) == 0
        trust = json.loads(capsys.readouterr().out)["trust"]
        assert f"this run is outside the range fitted: {outside};" in trust


@pytest.mark.parametrize("settings", [("parallel.tensor=2",), FLOAT8[1:]])
def test_a_kind_of_gpu_whose_judged_rows_had_more_trusts_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(on("grand_teton_h100", "single_switch"), "utf-8")
    like = (
        "cluster.nodes=1",
        "model.layers=40",
        "zero.emulate=fsdp2",
        "compute.profile=h100_hbm2e",
    )
    words = [word for each in (*like, *settings) for word in ("--set", each)]
    assert answer(["run", str(path), *words, "--no-check", "--json"]) == 0
    assert "this run is inside the range fitted;" in json.loads(capsys.readouterr().out)["trust"]


def test_steps_of_a_run_unlike_those_that_were_judged_have_no_known_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "llama2_7b", "--but", "zero.prefetch_units=0"]
    assert answer(words) == 0
    assert "No measurement has judged predictions like these" in capsys.readouterr().out
    words = ["compare", "llama2_7b", "--set", "zero.emulate=fsdp1", "--but", "model.layers=31"]
    assert answer(words) == 0
    evidence = fitted_kernels()["h100"].constants.training.evidence
    assert evidence is not None
    assert f"than the error of the prediction, {evidence.p90:.1%}" in capsys.readouterr().out


def test_constants_that_do_not_ship_are_refused_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["run", "tiny", "--set", "compute.profile=abacus"]) == 2
    message = capsys.readouterr().err
    assert message == (
        "zsim: tiny: compute.profile: 'abacus' must be one of "
        "a100, b200, gh200, h100, h100_hbm2e, h200, v100, v100_timed\n"
    )


def test_what_ships_was_fitted_to_rows_and_says_what_was_not() -> None:
    known = fitted_kernels()
    measured = {"a100", "b200", "gh200", "h100"}
    assert set(known) == measured | {"v100", "v100_timed", "h100_hbm2e", "h200"}
    for name, fitted in known.items():
        assert fitted.gpu == name
        assert bool(fitted.publications) == (name in measured)
        assert bool(fitted.rows["matmul"]) == (name in measured)
        assert fitted.sibling or all(fitted.rows.values())
    for name in ("a100", "gh200", "h100"):
        assert known[name].errors["held_out_matmul"] < 0.06


def test_a_table_of_kernels_becomes_a_file_beside_those_of_networks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"accelerator": "NVIDIA H100 SXM", "dtype": "bf16", "mamf_tflops": "700"}
    row |= {"best_shape_MxNxK": "2048x2048x8192", "source": "github:a/b/c.md@0123"}
    with (tmp_path / "matmul_peaks.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(row))
        writer.writeheader()
        writer.writerow(row)
    assert answer(["calibrate", "--from", str(tmp_path), "--to", str(tmp_path / "to")]) == 0
    path = tmp_path / "to" / "kernels" / "h100.toml"
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: matmul: median error 0.")
    first, *scaled = out.splitlines()
    assert first.endswith("fitted, nothing to hold out; the rest is assumed")
    assert [line.partition(": ")[2] for line in scaled] == ["the rest is scaled from h100"] * 3
    fitted = parse("h100", tomllib.loads(path.read_text("utf-8")))
    assert (fitted.gpu, fitted.rows["matmul"]) == ("h100", 1)
    assert fitted.publications == ("github:a/b@0123",)


def test_hardware_without_runs_says_whose_constants_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["run", "tiny", "--json", "--set", "compute.profile=v100"]) == 0
    trust = json.loads(capsys.readouterr().out)["trust"]
    assert "held-out runs of training on a100" in trust
    assert "constants of v100 are scaled from a100, of it no run was judged" in trust


def test_every_profile_names_the_runs_that_its_constants_of_training_rest_on() -> None:
    for name, fitted in fitted_kernels().items():
        evidence = fitted.constants.training.evidence
        assert evidence is not None
        assert evidence.gpu in {"a100", "h100", "h100_hbm2e"}, name
        assert evidence.fitted > 0
        assert evidence.judged > 0


NEARER = {
    "dgx_h100": ("compute.profile=h100", "network.profile=h100"),
    "grand_teton_h100": ("compute.profile=h100_hbm2e", "network.profile=h100"),
    "gb200_nvl72": ("network.profile=gb200",),  # nobody at hand timed its kernels
}


@pytest.mark.parametrize("node", NEARER)
def test_constants_that_ship_for_a_gpu_are_named_where_data_sheets_are_taken(node: str) -> None:
    assert fitted_for(topology(node, "single_switch", 1)) == NEARER[node]


def test_a_run_on_data_sheets_says_what_is_more_accurate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["run", "tiny", "--no-check", "--set", "network.profile=a100"]
    assert answer(words) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["more", "accurate", "--set", "compute.profile=a100,", "from", "measurements"]
    assert answer([*words, "--set", "compute.profile=a100"]) == 0
    assert "more accurate" not in capsys.readouterr().out
