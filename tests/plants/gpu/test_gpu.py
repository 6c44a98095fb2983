"""A GPU and a node are data: two TOML files, no source file, in zsim's folders or anywhere."""

import json
import shutil
from pathlib import Path

import pytest
from other_package import PLANTS, ROOT, Answer, answers, plant_files, sources_that_name

PACKAGE = ROOT / "topologies" / "zsim_topologies"
NODE = ("cluster.topology=none", "cluster.node=q7_server", "cluster.fabric=single_switch")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Return the output of commands with the two files in a copy of the package of topologies."""
    site = tmp_path_factory.mktemp("site")
    copied = site / PACKAGE.name
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PLANTS / "gpu" / "q7_48gb.toml", copied / "gpus")
    shutil.copy(PLANTS / "gpu" / "q7_server.toml", copied / "nodes")
    best = ("best", "gpt2", "--gpus", "8xq7", "--runtime", "fsdp2", "--batch", "65536", "--json")
    fixed = ("parallel.tensor=1", "parallel.pipeline=1", "activations.checkpointing=none")
    commands = {
        "list": ["list", "gpus"],
        "topology": ["topology", "q7_server", "--json"],
        "run": ["run", "tiny", "--json", *(word for each in NODE for word in ("--set", each))],
        "best": [*best, "--workers", "1", *(word for each in fixed for word in ("--set", each))],
        "error": ["show", "gpu", "q7_48gb"],
    }
    return dict(zip(commands, answers(site, *commands.values()), strict=True))


def test_a_gpu_and_a_node_need_two_files_of_data_and_none_of_source() -> None:
    assert plant_files("gpu") == {"q7_48gb.toml", "q7_server.toml"}
    assert sources_that_name("q7") == []


def test_every_command_knows_them_by_name(asked: dict[str, Answer]) -> None:
    for name, answer in asked.items():
        assert answer.returncode == 0, (name, answer.stderr)
    assert "q7_48gb" in asked["list"].stdout
    assert json.loads(asked["topology"].stdout)["gpus"] == 8
    assert json.loads(asked["run"].stdout)["step_time_s"] > 0
    assert json.loads(asked["best"].stdout)["best"] is not None


def test_files_of_ones_own_are_read_by_path(tmp_path: Path) -> None:
    shutil.copy(PLANTS / "gpu" / "q7_48gb.toml", tmp_path)
    text = (PLANTS / "gpu" / "q7_server.toml").read_text("utf-8")
    node = tmp_path / "q7_server.toml"
    node.write_text(text.replace('"q7_48gb"', json.dumps(str(tmp_path / "q7_48gb.toml"))), "utf-8")
    (shown,) = answers(tmp_path, ["topology", str(node), "--json"])
    assert shown.returncode == 0, shown.stderr
