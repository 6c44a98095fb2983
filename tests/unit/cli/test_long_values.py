"""Numbers and names that nobody means are one line, in every command that reads them."""

from pathlib import Path

import pytest

from zsim.cli.main import answer

HUGE, LONG = str(2**63), "a" * 300


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "words",
    [
        ["plan", LONG],
        ["run", f"{LONG}.toml"],
        ["sweep", LONG],
        ["topology", LONG],
        ["compare", LONG, "tiny"],
        ["check", "tiny", "--against", LONG],
        ["plan", "tiny", "--schedule", LONG],
        ["plan", "tiny", "--set", f"zero.deepspeed_config={LONG}"],
        ["plan", "tiny", "--set", f"zero.megatron_arguments={LONG}"],
        ["plan", "tiny", "--set", f"model.hf_config={LONG}"],
        ["plan", "tiny", "--set", f"cluster.topology={LONG}"],
        ["run", "tiny", "--prices", LONG],
        ["run", "tiny", "--ranks", HUGE],
        ["run", "tiny", "--ranks", "9" * 5000],
        ["topology", "dgx_a100_infiniband", "--nodes", HUGE],
        ["best", "gpt2", "--gpus", f"{HUGE}xh100"],
        ["best", "gpt2", "--gpus", f"{'9' * 5000}xh100"],
        ["best", "gpt2", "--gpus", f"{HUGE}xdgx_h100"],
        ["plan", "tiny", "--set", f"train.micro_batch_size=0x{'f' * 5000}"],
        ["plan", "tiny", "--set", f"parallel.data={HUGE}"],
        ["plan", "tiny", "--set", "model.layers=10000"],
        ["run", "llama2_7b", "--set", "model.head_size=1000000"],
        ["plan", "llama2_7b", "--set", "parallel.replicate=1000000"],
        ["plan", "tiny", "--set", "cluster.gpu_memory=" + "9" * 5000 + " GB"],
    ],
)
def test_a_value_that_nobody_means_is_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("zsim: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("option", ["--ranks", "--steps", "--seed"])
def test_a_number_of_too_many_digits_is_refused_without_being_repeated(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", "tiny", option, "9" * 5000]) == 2
    said = capsys.readouterr().err
    assert "must have at most 100 digits, has 5000" in said
    assert said.count("\n") == 1


def test_the_scenario_and_the_store_of_a_study_may_have_no_name_that_is_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.toml"
    axis = '[[axis]]\nkey = "zero.stage"\nvalues = [1, 2]\n'
    for name, store in ((LONG, []), ("tiny", ["--store", LONG])):
        study.write_text(f'question = "?"\n[base]\nscenario = "{name}"\n{axis}', "utf-8")
        assert answer(["sweep", str(study), *store]) == 2
        said = capsys.readouterr().err
        assert said.startswith("zsim: ")
        assert said.count("\n") == 1
