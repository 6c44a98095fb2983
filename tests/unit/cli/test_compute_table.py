"""`[compute]` on the command line, constants that ship, and files that calibration writes."""

import csv
import json
import tomllib
from pathlib import Path

import pytest

from zsim.cli.main import answer
from zsim.cluster.profile.in_training import ALONE
from zsim.cluster.profile.kernels import parse
from zsim.files.installed import fitted_for, fitted_kernels, topology
from zsim_lab.fit.training_fit import AS_ALONE


def run(capsys: pytest.CaptureFixture[str], *settings: str) -> dict[str, object]:
    words = ["run", "gpt3_175b", "--no-check", "--json"]
    for setting in settings:
        words += ["--set", setting]
    assert answer(words) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.one_commit_in(12)
def test_fitted_constants_change_times_and_what_is_to_be_trusted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, fitted = run(capsys), run(capsys, "compute.profile=h100")
    assert fitted["step_time_s"] != plain["step_time_s"]
    assert fitted["peak_allocated_bytes"] == plain["peak_allocated_bytes"]
    assert "±" in str(fitted["error"])
    assert "rates" in str(plain["error"])


def test_constants_that_do_not_ship_are_refused_with_those_that_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["run", "tiny", "--set", "compute.profile=abacus"]) == 2
    message = capsys.readouterr().err
    assert message == (
        "zsim: tiny: compute.profile: 'abacus' must be one of "
        "a100, b200, gb200, gb300, gh200, h100, h100_2025, h100_2026, h100_hbm2e, h100_hbm2e_2025, "
        "h100_nemo_2025, h200, v100, v100_timed\n"
    )


def test_what_ships_was_fitted_to_rows_and_says_what_was_not() -> None:
    known = fitted_kernels()
    measured = {"a100", "b200", "gh200", "h100"}
    later = {
        "gb200",
        "gb300",
        "h100_2025",
        "h100_2026",
        "h100_hbm2e_2025",
        "h100_nemo_2025",
        "h200",
    }
    assert set(known) == measured | later | {"v100", "v100_timed", "h100_hbm2e"}
    assert all(known[name].constants.vintage for name in later | {"a100", "h100", "b200"})
    for name, fitted in known.items():
        assert fitted.gpu == name
        assert bool(fitted.publications) == (name in measured)
        assert bool(fitted.rows["matmul"]) == (name in measured)
        assert fitted.sibling or all(fitted.rows.values())
    for name in ("a100", "gh200", "h100"):
        assert known[name].errors["held_out_matmul"] < 0.06


@pytest.mark.one_commit_in(9)
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
    of = {Path(line.partition(": ")[0]).stem: line.partition(": ")[2] for line in scaled}
    siblings = {"h100_hbm2e": "h100", "h100_hbm2e_2025": "h100_hbm2e", "h100_2026": "h200"}
    siblings |= {"gb200": "b200", "gb300": "gb200"}
    later = ("h100_2025", "h100_2026", "h100_nemo_2025", "gb200", "gb300")
    for gpu in ("h100_hbm2e", "h100_hbm2e_2025", "h200", *later):
        assert of[gpu] == f"the rest is scaled from {siblings.get(gpu, 'h100')}"
    assert of["b200"].startswith("matmul: median error")  # whose times ship
    fitted = parse("h100", tomllib.loads(path.read_text("utf-8")))
    assert (fitted.gpu, fitted.rows["matmul"]) == ("h100", 1)
    assert fitted.publications == ("github:a/b@0123",)


JUDGED = {
    "a100",
    "gb200",
    "gb300",
    "h100",
    "h100_hbm2e",
    "h100_hbm2e_2025",
    "h100_nemo_2025",
    "h200",
}
"""Profiles with judged runs on their GPU."""


def test_every_profile_names_the_runs_that_its_constants_of_training_rest_on() -> None:
    for name, fitted in fitted_kernels().items():
        evidence = fitted.constants.training.evidence
        if name in AS_ALONE:
            assert fitted.constants.training == ALONE
            continue
        assert evidence is not None
        assert evidence.gpu in JUDGED, name
        assert evidence.fitted > 0
        assert evidence.judged > 0


NEARER = {
    "dgx_h100": ("compute.profile=h100_2026", "network.profile=h100"),
    "grand_teton_h100": ("compute.profile=h100_hbm2e_2025", "network.profile=h100"),
    "gb200_nvl72": ("compute.profile=gb200", "network.profile=gb200"),
    "gb300_nvl72": ("compute.profile=gb300", "network.profile=gb300"),
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
