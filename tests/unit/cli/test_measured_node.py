"""Commands on a node that was measured, and what they refuse."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_answers import Ask, answered, refused
from measured_times import TIMES

from zsim.cluster.files.measured_node import MeasuredHost, MeasuredNode
from zsim.dtype import DType


@pytest.fixture
def node(tmp_path: Path) -> str:
    """File of a node of two ranks."""
    path = tmp_path / "node.toml"
    host = MeasuredHost(
        memory_bytes=2 * 10**10,
        memory_bytes_per_s=2e10,
        cores=2,
        adam_bytes_per_s=1e10,
        cast_bytes_per_s=5e9,
        copy_bytes_per_s=6e9,
    )
    made = MeasuredNode(
        title="two ranks",
        source="a test",
        ranks=2,
        rank_name="rank",
        memory_bytes=10**10,
        memory_bytes_per_s=1e10,
        flops_per_s={DType.FP32: 5e10},
        link_bytes_per_s=1e9,
        link_latency_s=1e-4,
        collective_share=0.3,
        host=host,
        drives=None,
        times=TIMES,
    )
    path.write_text(made.text(), "utf-8")
    return str(path)


@pytest.mark.one_commit_in(6)
def test_a_scenario_runs_on_the_ranks_that_were_measured(ask: Ask, node: str) -> None:
    found = answered(ask("run", "tiny", "--node", node, "--json"))
    assert "ranks = 2" in found["title"]
    assert found["step_time_s"] > 0
    assert "measured with zsim measure" in found["error"]["text"]
    alone = answered(ask("run", "tiny", "--node", node, "--ranks", "1", "--json"))
    assert alone["step_time_s"] < found["step_time_s"]  # it communicates nothing


@pytest.mark.one_commit_in(6)
def test_constants_of_a_data_sheet_have_no_say_on_a_measured_node(ask: Ask, node: str) -> None:
    words = ("run", "tiny", "--node", node, "--json")
    profiles = ("--set", "compute.profile=a100", "--set", "network.profile=a100")
    one, other = answered(ask(*words)), answered(ask(*words, *profiles))
    assert one["step_time_s"] == other["step_time_s"]


def test_a_scenario_leaves_its_own_drives_and_network_cards_behind(ask: Ask, node: str) -> None:
    words = ("run", "tiny", "--node", node, "--json")
    own = ("--set", "cluster.drives=2", "--set", "cluster.nics_per_node=3")
    one, other = answered(ask(*words)), answered(ask(*words, *own))
    assert one["step_time_s"] == other["step_time_s"]


def test_a_measured_node_is_a_topology(ask: Ask, node: str) -> None:
    found = answered(ask("topology", node, "--fabric", "single_switch", "--json"))
    assert (found["gpus"], found["drives"]) == (2, None)
    assert found["sources"]["measured"] == "a test"


@pytest.mark.one_commit_in(12)
def test_a_schedule_runs_on_the_node_or_on_the_cluster_of_a_scenario(
    ask: Ask, node: str, tmp_path: Path
) -> None:
    path = tmp_path / "schedule.json"
    assert ask("plan", "tiny", "--set", "parallel.data=2", "--schedule", path)[0] == 0
    there = answered(ask("run", path, "--node", node, "--json"))
    same = answered(ask("run", "tiny", "--node", node, "--json"))
    assert there["step_time_s"] == same["step_time_s"]
    elsewhere = answered(ask("run", path, "--cluster", "llama2_7b", "--json"))
    here = answered(ask("run", path, "--json"))
    assert elsewhere["step_time_s"] != here["step_time_s"]


@pytest.mark.one_commit_in(6)
def test_what_cannot_be_placed_is_told_in_one_line(ask: Ask, node: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    assert ask("plan", "tiny", "--schedule", path)[0] == 0
    for words, told in (
        (("tiny", "--node", node, "--ranks", "4"), f"--node: {node} has 2 ranks, 4 are asked for"),
        ((path, "--node", node), f"--node: {node} has 2 ranks, the schedule is for 4"),
        (("tiny", "--cluster", "tiny"), "--cluster: tiny is a scenario"),
        (
            ("tiny", "--node", node, "--cluster", "tiny"),
            "--cluster: cannot be combined with --node",
        ),
        (("tiny", "--node", "absent.toml"), "--node: absent.toml: no such file"),
        (("tiny", "--node", node, "--backend", "torch"), "--node: backend torch runs on this"),
    ):
        assert refused(ask("run", *words)).startswith(told)
    for compared, told in (
        (("tiny", "--node", node), "--node: needs --real"),
        (("tiny", "tiny", "--ranks", "2"), "--ranks: needs --real"),
        (("tiny", "tiny", "--real"), "B: stands without --real"),
        (("tiny", "--real", "--but", "zero.stage=1"), "--but: stands without --real"),
    ):
        assert refused(ask("compare", *compared)).startswith(told)


def test_measuring_refuses_what_it_cannot_in_one_line(ask: Ask, tmp_path: Path) -> None:
    assert "--seconds" in refused(ask("measure", "--seconds", "0"))
    assert "--out" in refused(ask("measure", "--out", tmp_path / "absent" / "node.toml"))
    absent = tmp_path / "absent"
    assert refused(ask("measure", "--drive", absent)) == f"drive: {absent} must be a folder"


@pytest.mark.one_commit_in(21)
def test_without_torch_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; from zsim.cli.main import main; main()"
    for words in (("measure",), ("compare", "tiny", "--real")):
        done = subprocess.run(  # what is imported here stays as it is
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
        )
        told = "zsim: backend 'torch' needs torch: pip install 'zsim[torch]'\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


@pytest.mark.one_commit_in(6)
def test_a_node_is_written_as_json_reads_it(ask: Ask, node: str, tmp_path: Path) -> None:
    """A job with measured times goes through a file without loss."""
    path = tmp_path / "schedule.json"
    changes = (f"cluster.node={node}", "cluster.fabric=single_switch", "cluster.topology=none")
    words = [word for each in (*changes, "parallel.data=2") for word in ("--set", each)]
    assert ask("plan", "tiny", *words, "--schedule", path)[0] == 0
    measured = json.loads(path.read_text("utf-8"))["cluster"]["gpu"]["measured"]
    assert measured["runs_on_host"] is True
    there = answered(ask("run", path, "--json"))
    assert (
        there["step_time_s"]
        == answered(ask("run", "tiny", "--node", node, "--json"))["step_time_s"]
    )
