"""A file of another kind in place of a scenario: one line tells where to name it."""

import json
from pathlib import Path

import pytest
from trainer_files import TRAINER_FILES
from valid_files import bases

from zsim.cli.main import answer

OTHERS = {
    "deepspeed_config": '{"zero_optimization": {"stage": 2}}',
    "megatron_arguments": "pretrain_gpt.py --num-layers 2 --hidden-size 64",
    "foundry_config": "global_train_batch_size: 8\n",
    "axolotl_config": "base_model: gpt2\nmicro_batch_size: 2\n",
    "litgpt_config": "checkpoint_dir: a/b\ntrain: {micro_batch_size: 1}\n",
    "nanotron_config": "parallelism: {dp: 1}\nmodel: {model_config: {}}\ntokens: {}\n",
}


def toml(tree: object) -> str:
    """Return sections of two levels as TOML."""
    assert isinstance(tree, dict)
    return "".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in inner.items())
        for name, inner in tree.items()
        if name != "quantize"
    )


def yaml(tree: dict[str, object]) -> str:
    """Return sections as YAML, with the values of a section on one line."""
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in tree.items())


def of_the_support() -> dict[str, str]:
    return {
        key: toml(tree) if name.endswith(".toml") else yaml(tree)
        for key, name, _, tree in TRAINER_FILES
    }


@pytest.mark.parametrize("command", ["run", "plan"])
def test_a_file_of_a_trainer_is_named_with_its_key(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, text in {**of_the_support(), **OTHERS}.items():
        path = tmp_path / f"{key}.txt"
        path.write_text(text, "utf-8")
        assert answer([command, str(path)]) == 2
        said = capsys.readouterr().err
        assert f'name it in a scenario: [zero] {key} = "{key}.txt"' in said
        assert said.count("\n") == 1


def test_a_file_of_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": 64}', "utf-8")
    assert answer(["run", str(path)]) == 2
    assert f"is the file of a model: zsim best {path} --gpus" in capsys.readouterr().err


def test_a_trainers_file_in_place_of_a_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(OTHERS["deepspeed_config"], "utf-8")
    assert answer(["best", str(path), "--gpus", "8xh100"]) == 2
    said = "model.hf_config: is the file of a trainer; name it as zero.deepspeed_config"
    assert said in capsys.readouterr().err


def test_scenarios_and_schedules_are_no_files_of_trainers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenarios, schedules, *_ = bases()
    for base in (*scenarios, *schedules[:2]):
        path = tmp_path / base.name
        path.write_text(base.text, "utf-8")
        for name, text in base.others:
            (tmp_path / name).write_text(text, "utf-8")
        answer(["plan", str(path)])
        assert "is the file of" not in capsys.readouterr().err
