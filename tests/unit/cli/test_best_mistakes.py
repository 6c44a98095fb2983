"""`zsim best` with options that people write first: understood, or refused with the fix."""

from dataclasses import replace

import pytest

from zsim.api.gpu_fleet import gpu_fleet
from zsim.api.training_budget import batch_of
from zsim.cli.main import answer
from zsim.mistake import MistakeError
from zsim_plan.answer.best_question import ADAPTED_SEQUENCES, question_of
from zsim_plan.answer.best_result import REASONS_SHOWN, BestResult, LossReason
from zsim_plan.answer.best_search import best_of
from zsim_plan.answer.setting_trial import SettingOutcome
from zsim_plan.answer.tried_setting import TriedSetting

REFUSED = {
    "the name first": (["--gpus", "h100x8"], "--gpus: 'h100x8': did you mean 8xh100?"),
    "no name": (["--gpus", "8"], "--gpus: '8': did you mean 8xh100, or 8 of other GPUs"),
    "no x": (["--gpus", "8rtx4090"], "--gpus: '8rtx4090': did you mean 8x4090?"),
    "no batch": (["--batch", "0"], "--batch: '0' must be a whole number of tokens, such as 4M"),
    "a unit": (["--batch", "4Mi"], "--batch: '4Mi' must be a whole number of tokens, such as 4M"),
    "no length": (["--sequence", "long"], "--sequence: 'long' must be a whole number of tokens, "),
    "two lengths": (
        ["--sequence", "4k", "--set", "model.sequence_length=4096"],
        "--sequence: cannot be combined with --set model.sequence_length; remove one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_mistake_is_answered_with_its_fix(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, why = REFUSED[case]
    assert answer(["best", "llama3.2-1b", "--gpus", "8xh100", *words]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"zsim: {why}")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("8xrtx4090", "8x4090"),
        ("8xRTX-4090", "8x4090"),
        ("8xh100-sxm", "8xh100"),
        ("8xnvidia-h100-80gb", "8xh100"),
        ("8xa100-80gb-pcie", "8xa100_pcie"),
        ("8xv100-sxm2-16gb", "8xv100_16gb"),
    ],
)
def test_longer_names_of_a_gpu_are_understood(text: str, word: str) -> None:
    assert gpu_fleet(text) == gpu_fleet(word)


@pytest.mark.parametrize("text", ["8xl40", "8xh100-40gb", "8xa100-40gb", "8xb100"])
def test_the_name_of_another_gpu_is_not_taken_for_a_known_one(text: str) -> None:
    with pytest.raises(MistakeError, match="--gpus: "):
        gpu_fleet(text)


def test_lengths_have_binary_units_as_batches_do() -> None:
    assert batch_of("32k", "--sequence") == 32 * 1024
    assert question_of("llama2-7b", "8xh100", ["model.sequence_length=1024"]).sequences == 4096


def test_a_step_with_lora_has_the_batch_of_a_fine_tuning() -> None:
    adapted = question_of("llama2-7b", "8xh100", ["model.lora.rank=8"])
    assert adapted.sequences == ADAPTED_SEQUENCES < question_of("llama2-7b", "8xh100").sequences
    assert question_of("llama2-7b", "256xh100", ["model.lora.rank=8"]).sequences == 256


def test_reasons_with_many_settings_are_shown_rather_than_counted_as_others() -> None:
    small = ["model.layers=1", "model.sequence_length=64", "model.vocab_size=512"]
    fixed = ["zero.stage=3", "parallel.tensor=1", "activations.checkpointing=none"]
    asked = question_of(
        "llama3.2-1b", "2xh100", [*small, *fixed], among=["fsdp1"], batch_tokens=128
    )
    found = best_of(asked, workers=1)
    few = [LossReason("simulated", f"reason {at}", 1) for at in range(REASONS_SHOWN)]
    shown = _with_losses(found, [*few, LossReason("left out", "offload", 8000)]).text()
    assert "8,000 left out  offload" in shown
    assert "1 others" in shown


def _with_losses(found: BestResult, losses: list[LossReason]) -> BestResult:
    return replace(found, losses=tuple(losses))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["show", "gpu"], "name: 'gpu' needs a name after it, of those in zsim list gpus"),
        (["check", "tiny", "--explain", "1"], "--explain: 1 has no finding"),
    ],
)
def test_other_commands_name_the_fix_as_well(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(words) == 2
    assert capsys.readouterr().err == f"zsim: {why}\n"


def test_a_gpu_is_shown_by_its_common_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["show", "gpu", "h100"]) == 0
    assert 'name = "H100-SXM5-80GB"' in capsys.readouterr().out


def test_cards_on_pcie_have_no_nvswitch(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["topology", "server_8x4090"]) == 0
    found = capsys.readouterr().out
    assert "GPU to other GPUs over PCIe: 8 x 24 GB/s" in found
    assert "NVSwitch" not in found


def test_stages_of_one_data_rank_are_one_choice() -> None:
    def choice(stage: int, data: int) -> tuple[object, ...]:
        changes = {"zero.stage": stage, "zero.emulate": "megatron", "parallel.data": data}
        outcome = SettingOutcome(fits=True)
        return TriedSetting(group=0, changes=changes, gpus=8, outcome=outcome, value=1.0).choice

    assert choice(0, 1) == choice(1, 1)
    assert choice(0, 2) != choice(1, 2)
