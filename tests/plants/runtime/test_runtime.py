"""A package of somebody else adds a runtime: one folder and one entry point."""

import json
from pathlib import Path

import pytest
from other_package import (
    PLANTS,
    Answer,
    answers,
    install_plant,
    plant_files,
    python,
    sources_that_name,
    zsim,
)

SETTINGS = ("zero.stage=3", "zero.emulate=mine", "zero.bucket_elements=500_000_000")
BEST = (
    "best",
    "gpt2",
    "--gpus",
    "8xh100",
    "--runtime",
    "mine",
    "--batch",
    "8192",
    "--workers",
    "1",
)
FIXED = (
    "parallel.tensor=1",
    "parallel.context=1",
    "activations.checkpointing=full",
    "train.micro_batch_size=1",
)
"""Values that leave two settings: the knob of the runtime."""

FORM = """
import json
from zsim_plan.page.form_fields import form_fields
from zsim_plan.page.setting_form import chosen_setting
runtime = next(each for each in form_fields() if each.name == "runtime")
chosen = chosen_setting({"runtime": "mine-3", "model": "gpt2", "count": "8", "offload": "all-host"})
print(json.dumps({"offered": "mine-3" in runtime.values, "zero": chosen.tables()["zero"]}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as an installer leaves it."""
    return install_plant(tmp_path_factory.mktemp("site"), "runtime")


@pytest.fixture(scope="module")
def asked(folder: Path) -> dict[str, Answer]:
    """Return the output of commands that run one after the other."""
    file, config = str(folder / "mine.json"), folder / "mine_config.json"
    (folder / "read.toml").write_text(READ.format(config=config.name), "utf-8")
    commands = {
        "list": ["list", "runtimes"],
        "run": ["run", "tiny", *settings("zero.mine.colour=2")],
        "plan": ["plan", "tiny", *settings("zero.mine.colour=3"), "--schedule", file],
        "check": ["check", file],
        "unknown option": ["check", "tiny", *settings("zero.mine.color=2")],
        "best": [*BEST, *said(*FIXED), "--config", str(config), "--json"],
        "read": ["run", str(folder / "read.toml"), "--json"],
    }
    return dict(zip(commands, answers(folder, *commands.values()), strict=True))


READ = """
title = "from a file of mine"
[model]
name = "gpt2"
[cluster]
node = "dgx_h100"
fabric = "rail_optimized"
[zero]
mine_file = "{config}"
[train]
precision = "bf16"
gradient_accumulation_steps = 1
[compute]
profile = "h100"
"""


def settings(*more: str) -> list[str]:
    return said(*SETTINGS, *more)


def said(*settings: str) -> list[str]:
    return [word for each in settings for word in ("--set", each)]


def test_it_is_one_folder_and_one_entry_point() -> None:
    entries = (PLANTS / "runtime" / "entry_points.txt").read_text("utf-8").splitlines()
    assert entries == ["[zsim.runtimes]", "mine = mine_runtime:RUNTIME"]
    assert {name.partition("/")[0] for name in plant_files("runtime")} == {
        "entry_points.txt",
        "mine_runtime",
    }
    assert sources_that_name("mine_runtime") == []


@pytest.mark.one_commit_in(9)
def test_it_is_listed_and_its_schedule_is_simulated(
    asked: dict[str, Answer],
) -> None:
    assert "  mine\n" in asked["list"].stdout
    assert asked["run"].returncode == 0, asked["run"].stderr


@pytest.mark.one_commit_in(9)
def test_its_schedule_is_written_read_again_and_proved(
    folder: Path, asked: dict[str, Answer]
) -> None:
    assert asked["plan"].returncode == 0, asked["plan"].stderr
    assert '"type": "Mine"' in (folder / "mine.json").read_text("utf-8")
    proved = asked["check"]
    assert proved.returncode == 0, proved.stderr
    assert "no findings" in proved.stdout
    assert "volume" in proved.stdout


@pytest.mark.one_commit_in(9)
def test_the_best_setting_is_written_as_its_file_and_read_back(
    folder: Path, asked: dict[str, Answer]
) -> None:
    assert asked["best"].returncode == 0, asked["best"].stderr
    written = json.loads((folder / "mine_config.json").read_text("utf-8"))
    assert written["shards"] * written["tensor"] == 8
    assert asked["read"].returncode == 0, asked["read"].stderr


@pytest.mark.one_commit_in(9)
def test_the_page_offers_it_and_the_host_costs_are_read(folder: Path) -> None:
    found = python(folder, "-c", FORM)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {
        "offered": True,
        "zero": {"stage": 3, "emulate": "mine", "mine": {"offload_policy": "cpu"}},
    }
    costs = "from zsim.runtimes.lookup import host_costs_of; print(host_costs_of('mine').unit_ps)"
    assert python(folder, "-c", costs).stdout == "1000000000\n"


@pytest.mark.one_commit_in(4)
def test_an_option_that_it_does_not_have_is_named(asked: dict[str, Answer]) -> None:
    refused = asked["unknown option"]
    assert refused.returncode == 2
    assert "zero.mine.color: unknown key; did you mean colour?" in refused.stderr


@pytest.mark.one_commit_in(9)
def test_without_it_the_runtimes_that_there_are_are_named(tmp_path: Path) -> None:
    refused = zsim(tmp_path, "check", "tiny", "--set", "zero.emulate=mine")
    assert refused.returncode == 2
    assert "zero.emulate: 'mine' must be 'ddp', 'deepspeed', 'fsdp1', " in refused.stderr
