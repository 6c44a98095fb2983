"""Forecasts in a file: each is made once, and a run that was killed goes on."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from zsim.api.run_forecast import Quantity, RunForecast
from zsim.cluster.profile.kernels import FittedKernels
from zsim.files.installed import fitted_kernels
from zsim.mistake import UnwrittenError
from zsim_lab.answer.resumed_forecasts import kept, key_of, resumed
from zsim_lab.answer.training_calibration import with_training
from zsim_lab.rows.published import Published

TINY: dict[str, Any] = {
    "title": "tiny",
    "model": {
        "architecture": "gpt",
        "layers": 1,
        "hidden_size": 64,
        "attention_heads": 4,
        "sequence_length": 32,
        "vocab_size": 128,
    },
    "cluster": {"topology": "dgx_a100_infiniband", "nodes": 1},
    "parallel": {"data": 2},
    "zero": {"stage": 1},
    "train": {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "precision": "bf16"},
}
RUN = ([TINY], Quantity.STEP_TIME)
LARGER = ([{**TINY, "model": {**TINY["model"], "layers": 2}}], Quantity.STEP_TIME)
WRONG = ([{**TINY, "zero": {"stage": 7}}], Quantity.STEP_TIME)


def ignore(done: float, total: float) -> None:
    """Discard progress."""


def test_a_run_that_goes_on_makes_no_forecast_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.jsonl"
    asked = [LARGER, RUN, RUN, WRONG, ([], Quantity.STEP_TIME)]
    first = resumed(asked, path, ignore, most=1)
    assert [each is None for each in first] == [True, False, False, True, True]  # the cheapest
    whole = resumed(asked, path, ignore)
    assert whole[1:3] == first[1:3]
    assert isinstance(whole[0], RunForecast)
    assert isinstance(whole[3], str)
    assert whole[4] is None
    assert len(path.read_text("utf-8").splitlines()) == 3
    monkeypatch.setattr("zsim_lab.answer.resumed_forecasts._forecast_of", None)
    assert resumed(asked, path, ignore) == whole


def test_a_line_that_was_not_finished_is_ignored_and_stays_apart(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    (made,) = resumed([RUN], path, ignore)
    text = path.read_text("utf-8")
    other_code = json.dumps({"key": "0", "made": {"seconds": 1.0}})
    path.write_text(f"{other_code}\n{text}{text[: len(text) // 2]}", "utf-8")
    assert kept(path) == {key_of(RUN): made}
    (other,) = resumed([LARGER], path, ignore)
    assert kept(path) == {key_of(RUN): made, key_of(LARGER): other}


def test_the_quantity_is_part_of_a_key() -> None:
    assert key_of(RUN) != key_of((RUN[0], Quantity.MEMORY))
    assert key_of(RUN) == key_of(([dict(reversed(TINY.items()))], Quantity.STEP_TIME))


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnwrittenError, match="missing"):
        resumed([RUN], tmp_path / "missing" / "kept.jsonl", ignore)


def published(model: str, seconds: float) -> Published:
    return Published(
        file="fsdp_mpt_training_runs",
        line=2,
        hardware="A100",
        model=model,
        sequence_length=32,
        scenario={**TINY, "compute": {"profile": "a100"}},
        source="a paper",
        step_time_s=seconds,
    )


def test_a_calibration_that_goes_on_simulates_no_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kept.jsonl"
    runs = [published(name, 0.001) for name in ("a", "b", "c", "d")]
    assert {run.judged for run in runs} == {True, False}
    kernels = [fitted_kernels()["a100"]]

    def calibrated(resume: Path | None) -> list[FittedKernels]:
        return with_training(kernels, runs, today=date.min, report=lambda _: None, resume=resume)

    first = calibrated(path)
    assert first == calibrated(None)
    monkeypatch.setattr("zsim_lab.answer.training_calibration.ProcessPoolExecutor", None)
    assert calibrated(path) == first
    path.write_text(path.read_text("utf-8").splitlines()[0] + "\n", "utf-8")
    with pytest.raises(TypeError):  # the others are simulated
        calibrated(path)
