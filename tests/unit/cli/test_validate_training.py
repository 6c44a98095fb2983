"""`zsim validate training` and `memory` on small tables of the form that is published."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zsim.api.forecast import FEW, forecast
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.backend.backend import Job
from zsim.cli.main import answer
from zsim.files.installed import fitted_kernels
from zsim.files.source import resolved
from zsim.scenario.tables import from_tables
from zsim_des import SimBackend
from zsim_lab.answer.training_calibration import judged_run
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.training_verdict import verdict

MPT = {
    "model": "mpt-tiny",
    "n_layers": 2,
    "d_model": 256,
    "n_heads": 4,
    "vocab": 512,
    "mlp_expansion": 4,
    "seq_len_tokens": 128,
    "n_gpus": 8,
    "gpus_per_node": 8,
    "gpu": "a100_80gb",
    "micro_batch_per_gpu_seqs": 4,
    "grad_accum": 2,
    "step_time_s_derived": 0.01,
    "precision": "amp_bf16",
    "fsdp_mixed_precision": "DEFAULT",
    "sharding_strategy": "FULL_SHARD",
    "activation_checkpointing": "True",
    "activation_cpu_offload": "False",
    "source": "nobody",
}
LLAMA = {
    "model": "Llama tiny",
    "n_layers": 2,
    "d_model": 256,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn": 512,
    "vocab": 512,
    "precision": "bf16 param / fp32 reduce",
    "gpu": "H100 95GB",
    "dp_shard": 8,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "technique": "FSDP2 eager",
    "compile": "N",
    "seq_len_tokens": 128,
    "local_batch_seqs": 2,
    "activation_checkpoint": "selective (op)",
    "reshard_after_forward": "default (always)",
    "peak_reserved_memory_GiB": 0.5,
    "step_time_s_derived": 0.01,
    "source": "nobody",
}


def written(folder: Path, name: str, rows: Sequence[Mapping[str, object]]) -> None:
    with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [MPT, MPT | {"seq_len_tokens": 256}, MPT | {"precision": "amp_fp8"}]
    written(tmp_path, "fsdp_mpt_training_runs", rows)
    one = {"technique": "FSDP1"}, {"cp": 2, "dp_shard": 4, "precision": "float8 rowwise"}
    rows = [LLAMA, LLAMA | one[0], LLAMA | one[1], LLAMA | {"pp": 2}]
    written(tmp_path, "fsdp2_llama_training_runs", rows)
    return tmp_path


def validated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert answer(["validate", *words, "--json"]) == 0
    found: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found["files"]


@pytest.mark.one_commit_in(9)
def test_predictions_stand_beside_published_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = folder / "picture.svg"
    files = validated(capsys, "training", "--data", str(folder), "--picture", str(picture))
    mpt, llama = files["fsdp_mpt_training_runs"], files["fsdp2_llama_training_runs"]
    assert (mpt["rows"], mpt["modelled"]) == (3, 2)
    assert mpt["judged"]["modelled"] + mpt["fitted"]["modelled"] == 2
    assert mpt["unmodelled"][0]["row"] == 4
    assert "fp8" in mpt["unmodelled"][0]["reason"]
    assert (llama["rows"], llama["modelled"]) == (4, 3)
    worst = mpt["worst"][0]
    assert worst["error"] == pytest.approx(worst["predicted"] / worst["published"] - 1)
    svg = picture.read_text("utf-8")
    # Five dots of runs, one of each of the two kinds of hardware, one for the hollow ones.
    assert svg.count("<circle") == 5 + 2 + 1
    for name in ("of_adapters.csv", "nccl_tests_sweeps.csv"):  # the second is for network
        (folder / name).write_text("model,peak\n", "utf-8")
    assert answer(["validate", "memory", "--data", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.endswith("not read, of a form that is not known: of_adapters.csv\n")
    assert "fsdp2_llama_training_runs: 3 of 4 rows are modelled" in printed
    assert "not line 5: pipeline parallel" in printed
    assert "fsdp_mpt" not in printed  # no row has a peak


@pytest.mark.one_commit_in(6)
def test_a_run_that_is_predicted_not_to_fit_has_all_its_micro_batches() -> None:
    (run,) = TABLES["fsdp_mpt_training_runs"].read(
        [{key: str(value) for key, value in (MPT | {"grad_accum": FEW + 4}).items()}]
    )
    scenario = dict(run.scenario)
    fits = forecast(scenario)
    too_large = forecast(scenario | {"cluster": {**scenario["cluster"], "gpu_memory": "20 MB"}})  # type: ignore[dict-item]
    assert isinstance(fits, RunForecast)
    assert isinstance(too_large, RunForecast)
    assert (fits.fits, too_large.fits) == (True, False)
    assert too_large.step_time_s == pytest.approx(fits.step_time_s)


def test_many_micro_batches_take_as_long_as_if_each_was_simulated() -> None:
    (run,) = TABLES["fsdp_mpt_training_runs"].read(
        [{key: str(value) for key, value in (MPT | {"grad_accum": FEW + 4}).items()}]
    )
    found = forecast(run.scenario)
    assert isinstance(found, RunForecast)
    document = resolved("it", from_tables(run.scenario)).document
    assert document.model is not None
    assert document.cluster is not None
    job = Job(schedule=document.schedule, model=document.model, cluster=document.cluster, steps=2)
    begin, end = SimBackend().step_ends_ps(job)
    assert found.step_time_s == pytest.approx((end - begin) / 1e12, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["weather"], "zsim: what: 'weather' must be one of network, training, memory"),
        (
            ["training", "--picture", "x.gif"],
            "zsim: --picture: x.gif: must end in .svg, .png or .pdf",
        ),
        (
            ["network", "--picture", "x.svg"],
            "zsim: --picture: x.svg: is for training, memory, paper and pipelines",
        ),
    ],
)
def test_what_cannot_be_validated_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["validate", words[0], "--data", str(tmp_path), *words[1:]]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_a_missing_column_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {key: value for key, value in MPT.items() if key != "d_model"}
    written(tmp_path, "fsdp_mpt_training_runs", [row])
    assert answer(["validate", "training", "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip().endswith("no column 'd_model'")


def test_sweeps_that_judge_are_apart_from_those_that_may_be_fitted() -> None:
    runs = [
        Published(
            file="table",
            line=line,
            hardware="x",
            model="m",
            sequence_length=line,
            scenario={"title": "x", "parallel": {"data": 8}},
            source="nobody",
            step_time_s=1.0,
        )
        for line in range(2, 22)
    ]
    assert {run.judged for run in runs} == {True, False}
    (tiny,) = TABLES["fsdp_mpt_training_runs"].read(
        [{key: str(value) for key, value in MPT.items()}]
    )
    simulated = forecast(tiny.scenario)
    assert isinstance(simulated, RunForecast)
    forecasts = [replace(simulated, step_time_s=1.5 if run.judged else 1.0) for run in runs]
    found = verdict("table", Quantity.STEP_TIME, runs, forecasts)
    assert found.kept is not None
    assert found.fitted is not None
    assert (found.kept.median, found.fitted.median) == (0.5, 0.0)
    assert found.kept.rows + found.fitted.rows == 20
    assert all(row.is_kept for row in found.worst)


LARGER = {"n_layers": 4, "d_model": 2048, "n_heads": 16, "seq_len_tokens": 2048, "n_gpus": 16}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("grad_accum", [2, FEW + 4])
def test_calibration_judges_a_run_by_the_step_that_is_predicted_for_it(grad_accum: int) -> None:
    cells = MPT | {"gpu": "h100_80gb", "grad_accum": grad_accum} | LARGER
    (run,) = TABLES["fsdp_mpt_training_runs"].read([{k: str(v) for k, v in cells.items()}])
    found = forecast(run.scenario)
    assert isinstance(found, RunForecast)
    off = judged_run(run, fitted_kernels()["h100"].constants)
    assert run.step_time_s is not None
    assert off == pytest.approx(abs(found.step_time_s / run.step_time_s - 1), rel=1e-9)


@pytest.mark.one_commit_in(9)
def test_a_folder_is_judged_whole_whatever_its_rows_call_things(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = {"gpu": "NVIDIA H100 80GB HBM3", "activation_checkpoint": "per-op SAC", "compile": ""}
    rows = [LLAMA, LLAMA | odd | {"pp": "", "cp": "", "tp": ""}, LLAMA | {"gpu": "GH200 96GB"}]
    written(tmp_path, "fsdp2_llama_training_runs", rows)
    written(tmp_path, "fsdp_mpt_training_runs", [MPT, MPT | {"gpu": "H100-80GB"}])
    (tmp_path / "of_adapters.csv").write_text("model,peak\n", "utf-8")
    assert answer(["validate", "--all-rows", "--data", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    llama, mpt = (found["files"][f"{name}_training_runs"] for name in ("fsdp2_llama", "fsdp_mpt"))
    for quantity in ("step time", "peak memory"):
        assert (llama[quantity]["rows"], llama[quantity]["modelled"]) == (3, 2)
        assert "gpu 'GH200 96GB' is not one of h100 96 GB" in str(llama[quantity]["unmodelled"])
    assert mpt["step time"]["judged"]["modelled"] == mpt["step time"]["modelled"] == 2
    assert found["not_read"] == ["of_adapters.csv"]
    assert "5 of 5 rows predicted" in shown.err
    assert answer(["validate", "--all-rows", "--data", str(tmp_path)]) == 0
    assert "may be fitted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--all-rows"], "--data: missing; --all-rows needs a folder of published tables"),
        (["memory", "--all-rows"], "--all-rows: judges all tables, not memory alone"),
        ([], "what: '' must be one of network, training, memory, paper"),
    ],
)
def test_what_is_to_be_judged_is_said_once(
    words: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["validate", *words]) == 2
    assert fault in capsys.readouterr().err
