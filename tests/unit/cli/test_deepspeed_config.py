"""`[zero] deepspeed_config` on the command line: what is read, what is said, and where."""

import json
from pathlib import Path

import pytest

from zsim.cli.main import answer

SCENARIO = """
title = "from a configuration"
[model]
layers = 2
hidden_size = 32
attention_heads = 4
sequence_length = 64
vocab_size = 256
[cluster]
topology = "dgx_h100_infiniband"
[parallel]
data = 2
[zero]
deepspeed_config = "ds_config.json"
[train]
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e6,
        "sub_group_size": "1e9",
        "stage3_prefetch_bucket_size": "auto",
    },
    "steps_per_print": 100,
}
NAMED = (
    "zsim: ds_config.json: not modelled: "
    "scheduler (the learning rate is train.learning_rate in every step)\n"
)
BY_HAND = [
    "zero.emulate=deepspeed",
    "zero.stage=3",
    "zero.deepspeed.overlap_comm=true",
    "zero.deepspeed.reduce_bucket_size=5e6",
    "zero.deepspeed.stage3_prefetch_bucket_size=921",
    "train.clip_norm=1.0",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=2",
    "train.precision=bf16",
    "train.beta2=0.95",
]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO, "utf-8")
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG), "utf-8")
    return path


def test_it_runs_as_the_same_scenario_by_hand_and_names_once_what_is_not_modelled(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", str(scenario), "--json"]) == 0
    read = capsys.readouterr()
    assert read.err == NAMED
    by_hand = scenario.parent / "by_hand.toml"
    by_hand.write_text(SCENARIO.replace('deepspeed_config = "ds_config.json"', ""), "utf-8")
    settings = [word for setting in BY_HAND for word in ("--set", setting)]
    assert answer(["run", str(by_hand), "--json", *settings]) == 0
    written = capsys.readouterr()
    assert written.err == ""
    same = {"wall_time_s": 0, "title": ""}
    assert json.loads(read.out) | same == json.loads(written.out) | same


@pytest.mark.parametrize("command", ["plan", "check"])
def test_other_commands_name_it_too(
    command: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer([command, str(scenario), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == NAMED
    json.loads(printed.out)


def test_of_the_ranks_that_torchrun_started_the_first_speaks(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert answer(["plan", str(scenario)]) == 0
    assert capsys.readouterr().err == ""


def test_a_configuration_of_what_is_modelled_says_nothing(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"zero_optimization": {"stage": 1}, "train_batch_size": 4}
    (scenario.parent / "ds_config.json").write_text(json.dumps(config), "utf-8")
    assert answer(["run", str(scenario)]) == 0
    assert capsys.readouterr().err == ""


def test_it_is_looked_for_beside_the_scenario_and_from_here(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = scenario.parent / "elsewhere"
    elsewhere.mkdir()
    (scenario.parent / "ds_config.json").rename(elsewhere / "ds_config.json")
    assert answer(["plan", str(scenario)]) == 2
    assert capsys.readouterr().err == (
        f"zsim: {scenario}: zero.deepspeed_config: 'ds_config.json': no such file or directory\n"
    )
    monkeypatch.chdir(elsewhere)
    assert answer(["plan", str(scenario)]) == 0


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"\xff\xfe\0", "zero.deepspeed_config: 'ds_config.json' is not text"),
        (
            b"stage = 3",
            "zero.deepspeed_config: not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
        (b"[" * 100_000, "zero.deepspeed_config: not JSON: nested too deeply"),
        (
            b'{"zero_optimization": {"stage": 4}}',
            "zero.deepspeed_config: zero_optimization.stage: 4 must be 0, 1, 2 or 3",
        ),
    ],
)
def test_what_cannot_be_read_is_one_line(
    text: bytes, line: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scenario.parent / "ds_config.json").write_bytes(text)
    words = ["run", str(scenario), "--set", "train.micro_batch_size=1"]
    assert answer(words) == 2
    printed = capsys.readouterr()
    assert printed.err == f"zsim: {scenario}: {line}\n"
    assert printed.out == ""


def test_a_name_on_two_lines_is_named_on_one(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CONFIG | {"a\nb": 1}
    (scenario.parent / "ds_config.json").write_text(json.dumps(config), "utf-8")
    assert answer(["plan", str(scenario)]) == 0
    assert capsys.readouterr().err.count("\n") == 1
