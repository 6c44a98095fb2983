"""`zsim calibrate` and `zsim validate network`: files in, files and figures out."""

import csv
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_answers import Ask

from zsim.cli.option import Code
from zsim.cluster.profile.files import parse
from zsim.files.installed import network_profiles
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.algorithm.installed_algorithms import check
from zsim.network.tuner import alone_s
from zsim_lab.fit.constants import START
from zsim_lab.verdict.network_verdict import SIZE_CLASSES


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """A folder with measurements of one collective on hardware that has the start's constants."""
    links = Bandwidths(gpu=450 * 10**9, node=400 * 10**9, pair=50 * 10**9)
    rows: list[dict[str, object]] = []
    for power in range(16, 32, 3):
        seconds = alone_s(START, Collective.ALL_GATHER, 2**power, GroupShape(ranks=8), links=links)
        rows.append(
            {
                "gpu": "NVIDIA H100",
                "collective": "all-gather",
                "group_size": 8,
                "total_tensor_bytes": 2**power,
                "time_us": seconds * 1e6,
                "source": "drawn",
            }
        )
    with (tmp_path / "collectives_h100_one_node.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return tmp_path


def test_a_folder_of_rows_becomes_a_profile_for_each_gpu(ask: Ask, tables: Path) -> None:
    code, out, err = ask("calibrate", "--from", tables, "--to", tables / "profiles")
    assert code == Code.DONE
    assert "h100: 6 rows" in err
    assert "median error 0.0% fitted, nothing to hold out" in out
    (written,) = (tables / "profiles").iterdir()
    profiles = parse("h100", tomllib.loads(written.read_text("utf-8")), check)
    assert profiles.shared["link"] == START["link"]
    assert profiles.publications == ("drawn",)


@pytest.mark.one_commit_in(6)
def test_the_answer_and_the_other_files_stand_where_one_profile_cannot_be_written(
    ask: Ask, tables: Path
) -> None:
    profiles = tables / "profiles"
    _, answer, _ = ask("calibrate", "--from", tables, "--to", profiles)
    profiles.joinpath("h100.toml").unlink()
    profiles.joinpath("h100.toml").symlink_to("/dev/full")
    code, out, err = ask("calibrate", "--from", tables, "--to", profiles)
    assert (code, out) == (Code.UNWRITTEN, answer)
    line = f"done, but {profiles / 'h100.toml'} could not be written: no space left on device\n"
    assert err.endswith(f"zsim: {line}")


def test_predictions_stand_beside_what_was_measured(ask: Ask, tables: Path) -> None:
    code, out, _ = ask("validate", "network", "--data", tables, "--json")
    assert code == Code.DONE
    found = json.loads(out)["files"]["collectives_h100_one_node"]
    assert (found["rows"], found["modelled"], found["unmodelled"]) == (6, 6, [])
    for key in ("median_abs_error", "mean_abs_error", "p90_abs_error"):
        assert 0 <= found[key] < 1
    assert set(found["hardware"]) == {"h100, 64 KiB to 16 MiB", "h100, 16 MiB and more"}
    code, out, _ = ask("validate", "network", "--data", tables)
    assert code == Code.DONE
    assert "collectives_h100_one_node: 6 of 6 rows are modelled" in out


def test_errors_on_groups_that_were_held_out_stand_beside_those_of_the_fit(
    ask: Ask, tables: Path
) -> None:
    _, out, _ = ask("validate", "network", "--data", tables, "--json")
    found = json.loads(out)["held_out"]
    profiles = network_profiles()
    assert {"h100", "a100", "gb200"} <= set(found)
    for gpu, sizes in found.items():
        for size, name in SIZE_CLASSES.items():
            if size in sizes:
                assert sizes[size] == {
                    "fitted_median_abs_error": profiles[gpu].errors[f"fitted_{name}"],
                    "held_out_median_abs_error": profiles[gpu].errors[f"held_out_{name}"],
                }
    _, out, _ = ask("validate", "network", "--data", tables)
    assert "h100   16 MiB and more" in out
    assert "held out" in out


@pytest.mark.one_commit_in(6)
def test_every_cluster_is_left_out_once_and_predicted_by_the_others(ask: Ask, tables: Path) -> None:
    rows = (tables / "collectives_h100_one_node.csv").read_text("utf-8").splitlines()
    (tables / "allreduce_h200_b200.csv").write_text(
        "platform,gpu,collective,n_ranks,n_nodes,size_bytes,time_us_derived,source\n"
        + "".join(
            f"8x H100 node,H100,{collective.replace('-', '_')},{ranks},1,{size},{time},drawn\n"
            for _, collective, ranks, size, time, _ in (row.split(",") for row in rows[1:])
        ),
        "utf-8",
    )
    code, out, _ = ask("validate", "network", "--data", tables, "--left-out", "--json")
    assert code == Code.DONE
    found = json.loads(out)
    every, another = found["files"].pop("all"), found["files"].pop("by another cluster")
    assert set(found["files"]) == {"h100/xla", "h100/8x_h100_node"}
    large = "one node, 16 MiB and more"
    assert every["sizes"][large]["modelled"] == 6
    assert every["sizes"][large]["median_abs_error"] < 0.01
    assert another["sizes"][large]["median_abs_error"] < 1e-9
    code, out, _ = ask("validate", "network", "--data", tables, "--left-out")
    assert code == Code.DONE
    assert "each cluster left out" in out
    assert "held out once" in out
    code, _, err = ask("validate", "training", "--data", tables, "--left-out")
    assert (code, err) == (Code.MISTAKE, "zsim: --left-out: is for network\n")


def test_links_that_were_timed_become_a_profile_that_says_what_it_was_scaled_from(
    ask: Ask, tables: Path
) -> None:
    rows = (tables / "collectives_h100_one_node.csv").read_text("utf-8")
    (tables / "collectives_h100_one_node.csv").write_text(rows.replace("H100", "A100"), "utf-8")
    (tables / "link_alpha_beta_v100.csv").write_text(
        "topology,gpus_per_node,nics_per_node,intra_alpha,intra_beta_list,inter_alpha,inter_beta,"
        "source\nDGX2_1MB,16,8,0.3,[8],2.6,105.0,a paper\n",
        "utf-8",
    )
    code, out, _ = ask("calibrate", "--from", tables, "--to", tables / "profiles")
    assert code == Code.DONE
    assert "v100.toml: links as timed, all else scaled from a100" in out
    (tables / "link_alpha_beta_v100.csv").write_text("topology\nDGX2_1MB\n", "utf-8")
    code, _, err = ask("calibrate", "--from", tables, "--to", tables / "profiles")
    assert (code, err.count("\n")) == (Code.MISTAKE, 1)
    assert "link_alpha_beta_v100: no column 'source', 'gpus_per_node', 'nics_per_node', " in err


@pytest.mark.parametrize("command", [("calibrate", "--from"), ("validate", "network", "--data")])
def test_what_cannot_be_read_is_refused_in_one_line(
    ask: Ask, tmp_path: Path, command: tuple[str, ...]
) -> None:
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    assert ask(*command, missing) == (Code.MISTAKE, "", f"zsim: {missing}: no such folder\n")
    code, _, err = ask(*command, empty)
    assert code == Code.MISTAKE
    assert err.startswith(f"zsim: {empty}: holds none of nccl_tests_sweeps.csv, ")
    table = empty / "collectives_h100_one_node.csv"
    table.write_text("gpu,collective\nH100,all-gather\n", "utf-8")
    code, _, err = ask(*command, empty)
    assert (code, err.count("\n")) == (Code.MISTAKE, 1)
    assert "collectives_h100_one_node: no column 'source', 'group_size', 'total_" in err
    table.write_bytes(b"\xff\xfe\x00")
    code, _, err = ask(*command, empty)
    assert (code, err.count("\n")) == (Code.MISTAKE, 1)


def test_every_profile_that_ships_is_of_the_gpu_that_it_is_named_after() -> None:
    profiles = network_profiles()
    assert {"a100", "b200", "gb200", "h100", "h200"} <= set(profiles)
    for name, each in profiles.items():
        assert each.gpu == name
        assert each.publications or each.scaled_from in profiles
        assert each.errors or each.scaled_from in profiles


def without_scipy(*words: str) -> subprocess.CompletedProcess[str]:
    """The answer of zsim where scipy is not installed."""
    code = "import sys; sys.modules['scipy'] = None; from zsim.cli.main import main; main()"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.one_commit_in(15)
def test_calibrate_says_in_a_line_what_to_install_and_nothing_else_needs_it(tables: Path) -> None:
    done = without_scipy("calibrate", "--from", str(tables), "--to", str(tables / "profiles"))
    line = "zsim: calibrate: needs scipy (pip install 'zsim[calibrate]')\n"
    assert (done.returncode, done.stdout, done.stderr) == (Code.MISTAKE, "", line)
    assert not (tables / "profiles").exists()
    for words in (("validate", "network", "--data", str(tables)), ("run", "tiny")):
        done = without_scipy(*words)
        assert (done.returncode, done.stderr) == (Code.DONE, ""), words
