"""`[model] hf_config` on the command line: where the file is looked for, and what is said."""

import json
from pathlib import Path

import pytest

from zsim.cli.main import answer

SCENARIO = """
title = "from a config"
[model]
hf_config = "{path}"
sequence_length = 64
[cluster]
topology = "dgx_h100_infiniband"
[parallel]
data = 2
[zero]
stage = 2
[train]
micro_batch_size = 1
gradient_accumulation_steps = 1
precision = "bf16"
"""
CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.toml"
    path.write_text(SCENARIO.format(path="config.json"), "utf-8")
    return path


@pytest.mark.one_commit_in(6)
def test_a_configuration_beside_the_scenario_is_read_and_trained(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (scenario.parent / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    assert answer(["run", str(scenario), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    words = ["run", str(scenario), "--backend", "torch", "--ranks", "1", "--steps", "1", "--json"]
    assert answer(words) == 0
    trained = json.loads(capsys.readouterr().out)
    assert simulated["step_time_s"] > 0
    assert trained["losses"][0] == pytest.approx(5.545, rel=0.02)  # log 256: as good as guessing


def test_a_configuration_is_looked_for_from_here_too(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = scenario.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    assert answer(["plan", str(scenario)]) == 2
    assert capsys.readouterr().err == (
        f"zsim: {scenario}: model.hf_config: 'config.json': no such file or directory\n"
    )
    monkeypatch.chdir(elsewhere)
    assert answer(["plan", str(scenario)]) == 0


def test_a_configuration_of_another_architecture_is_one_line(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = json.dumps(CONFIG | {"model_type": "bert"})
    (scenario.parent / "config.json").write_text(changed, "utf-8")
    assert answer(["run", str(scenario)]) == 2
    assert capsys.readouterr().err == (
        f"zsim: {scenario}: model.hf_config: model_type 'bert' is an encoder, only decoders are "
        "modelled\n"
    )
    (scenario.parent / "config.json").write_bytes(b"\xff\xfe\0")
    assert answer(["run", str(scenario)]) == 2
    assert capsys.readouterr().err == (
        f"zsim: {scenario}: model.hf_config: 'config.json' is not text\n"
    )


LONG = json.dumps(CONFIG | {"max_position_embeddings": 8192})


def without_length(scenario: Path) -> Path:
    scenario.write_text(SCENARIO.replace("sequence_length = 64\n", "").format(path="config.json"))
    (scenario.parent / "config.json").write_text(LONG, "utf-8")
    return scenario


def test_a_length_that_nobody_gave_is_said(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = without_length(scenario)
    assert answer(["plan", str(path)]) == 0
    assert capsys.readouterr().err == (
        "zsim: config.json: model.sequence_length: not given, 8,192 is taken, "
        "max_position_embeddings of the file, its longest; trainings are often shorter\n"
    )
    assert answer(["plan", str(path), "--set", "model.sequence_length=64"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("key", ["model.hf_config", "model.name"])
def test_another_model_replaces_the_shape_and_the_title(
    key: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(scenario.parent / "config.json") if key == "model.hf_config" else "pythia-70m"
    (scenario.parent / "config.json").write_text(LONG, "utf-8")
    words = ["plan", "tiny", "--set", f"{key}={path}", "--set", "model.sequence_length=16"]
    assert answer([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == (f"{path}: ZeRO stage 3 on 4 A100, with model.sequence_length = 16")
    assert answer(["plan", str(scenario), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    if key == "model.hf_config":
        assert found["parameters"] == alone["parameters"]
    assert answer([*words, "--json", "--set", "title=Mine"]) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("Mine, with ")


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("megabytes", "helps"), [(40, "parallel.context=2"), (20, "model.sequence_length=1024")]
)
def test_a_run_that_is_too_long_fits_with_context_ranks_or_shorter_sequences(
    megabytes: int, helps: str, scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(without_length(scenario)), "--set", "train.steps=1"]
    words += ["--set", f'cluster.gpu_memory="{megabytes} MB"', "--json"]
    assert answer(words) == 1
    remedies = json.loads(capsys.readouterr().out)["remedies"]
    (settings,) = [each["settings"] for each in remedies if helps in each["settings"]]
    assert answer([*words, *(word for setting in settings for word in ("--set", setting))]) == 0


@pytest.mark.one_commit_in(6)
def test_a_remedy_with_shorter_sequences_says_so(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(without_length(scenario)), "--set", "train.steps=1"]
    assert answer([*words, "--set", 'cluster.gpu_memory="20 MB"']) == 1
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "it would fit" in each]
    assert "model.sequence_length=1024: " in line
    assert line.endswith(" a step, which has fewer tokens")


def test_a_config_for_long_contexts_is_planned_at_the_usual_length(
    scenario: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = without_length(scenario)
    long = json.dumps(CONFIG | {"max_position_embeddings": 131_072})
    (scenario.parent / "config.json").write_text(long, "utf-8")
    assert answer(["plan", str(path), "--json"]) == 0
    usual = capsys.readouterr()
    assert usual.err == (
        "zsim: config.json: model.sequence_length: not given, 8,192 is taken, the usual length of "
        "pretraining; max_position_embeddings of the file allows up to 131,072\n"
    )
    peaks = []
    for length in (8192, 131_072):
        words = ["plan", str(path), "--json", "--set", f"model.sequence_length={length}"]
        assert answer(words) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_allocated_bytes"])
    assert json.loads(usual.out)["peak_allocated_bytes"] == peaks[0] != peaks[1]
