"""Rows of NVIDIA's publications: blanks come from their recipes, and the rest has a reason."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from zsim.api.forecast import forecast
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.files.source import resolved
from zsim.mistake import MistakeError
from zsim.scenario.tables import from_tables
from zsim_lab.rows.published import MIB, Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.training_verdict import predicted

DGXC = {
    "source": "github:NVIDIA/dgxc-benchmarking/nemotron/README_340b.md@v25.02.02 (0)",
    "gpu": "H100",
    "model": "nemotron4_340b",
    "n_gpus": "128",
    "gpus_per_node": "8",
    "layers": "",
    "tp": "8",
    "pp": "8",
    "vpp": "12",
    "cp": "",
    "micro_batch": "1",
    "global_batch": "16",
    "seq_len": "4096",
    "precision": "BF16",
    "step_time_s": "5",
}
BRIDGE = {
    "source": "github:NVIDIA-NeMo/Megatron-Bridge/docs/performance-summary-archive.md@0",
    "gpu": "GB200",
    "task": "pretrain",
    "model": "LLAMA3_8B",
    "release": "25.11",
    "n_gpus": "8",
    "tp": "1",
    "pp": "1",
    "vpp": "",
    "cp": "1",
    "fsdp": "0",
    "micro_batch": "2",
    "global_batch": "128",
    "seq_len": "8192",
    "precision": "FP8-CS",
    "step_time_s_derived": "4",
}
MLPERF = {
    "source": "github:mlcommons/training_results_v5.0/NVIDIA/results/x/llama31_405b@0",
    "gpu": "NVIDIA Blackwell GPU (GB200)",
    "model": "llama31_405b",
    "n_gpus": "512",
    "tp": "4",
    "pp": "8",
    "vpp": "8",
    "cp": "2",
    "micro_batch": "1",
    "global_batch": "64",
    "config": "x/config_GB200_128x4x112xtp4pp8cp2_cg.sh",
    "seq_len": "8192",
    "precision": "",
    "step_time_s_median": "",
    "step_time_s_derived": "20",
}
GOLDEN = {
    "source": "github:NVIDIA/Megatron-LM/tests/x@0",
    "test": "gpt/gpt3_mcore_te_tp2_pp2",
    "gpu": "H100",
    "n_gpus": "8",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "kv_groups": "",
    "vocab_note": "50257",
    "fsdp": "",
    "tp": "2",
    "pp": "2",
    "vpp": "",
    "cp": "1",
    "dist_opt": "False",
    "sequence_parallel": "False",
    "micro_batch": "4",
    "global_batch": "32",
    "seq_len": "1024",
    "precision": "bf16",
    "recompute": "",
    "overlap_grad_reduce": "False",
    "overlap_param_gather": "False",
    "mem_max_allocated_GiB": "1.5",
}
HUB = {
    "source": "github:Lightning-AI/litgpt/config_hub/finetune/README.md@0",
    "dataset": "litgpt_config_hub",
    "method": "llama-3.2-1b/qlora.yaml",
    "model": "llama-3.2-1b",
    "hardware": "1xA10G",
    "micro_batch_seqs": "2",
    "peak_memory": "5.53 GB",
}
ROWS = {
    "memory_peaks": HUB,
    "dense_dgxc": DGXC,
    "dense_megatron_bridge": BRIDGE,
    "dense_mlperf": MLPERF,
    "dense_megatron_goldens": GOLDEN,
}


def run_of(table: str, **cells: str) -> Published:
    (run,) = TABLES[table].read([{**ROWS[table], **cells}])
    return run


def keys(run: Published, table: str) -> dict[str, Any]:
    assert not run.reason
    return cast("dict[str, Any]", run.scenario[table])


@pytest.mark.parametrize("table", ROWS)
def test_a_row_is_a_scenario_that_resolves(table: str) -> None:
    run = run_of(table)
    assert run.reason == ""
    assert resolved("row", from_tables(run.scenario)).scenario is not None


def test_a_row_of_litgpt_is_read_as_its_file_would_be(tmp_path: Path) -> None:
    path = tmp_path / "hub.yaml"
    path.write_text(
        "checkpoint_dir: checkpoints/meta-llama/Llama-3.2-1B\nprecision: bf16-true\n"
        "quantize: bnb.nf4\ndevices: 1\nlora_r: 32\nlora_dropout: 0.05\nlora_key: false\n"
        "train: {global_batch_size: 2, micro_batch_size: 2, max_seq_length: 512}\n",
        "utf-8",
    )
    row = resolved("row", from_tables(run_of("memory_peaks").scenario)).job()
    machine = ("cluster", "compute", "network")
    tables = {name: keys(run_of("memory_peaks"), name) for name in machine}
    tables |= {"model": {}, "train": {}, "zero": {"litgpt_config": str(path)}}
    mine = resolved("mine", from_tables({"title": "mine", **tables})).job()
    assert mine.schedule == row.schedule


def test_without_pyyaml_one_line_says_what_rows_of_litgpt_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    for module in ("zsim.runtimes.trainer_files.yaml_text", "zsim_runtimes.ddp.litgpt_reader"):
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.delattr(module, raising=False)
    with pytest.raises(MistakeError, match=r"litgpt_config: needs yaml.*pip install 'zsim\[yaml"):
        run_of("memory_peaks")


def test_degrees_that_a_page_leaves_open_are_those_of_its_scripts() -> None:
    assert keys(run_of("dense_dgxc"), "parallel")["context"] == 2
    assert keys(run_of("dense_dgxc", precision="FP8"), "parallel")["context"] == 1
    later = {"source": "README.md@v25.04.02 (0)", "cp": "1", "vpp": "NA", "global_batch": "64"}
    megatron = keys(run_of("dense_dgxc", **later), "zero")["megatron"]
    assert megatron["num_virtual_stages_per_pipeline_rank"] == 12


@pytest.mark.parametrize(("layers", "is_counted"), [("126", True), ("64", False)])
def test_layers_that_chunks_do_not_divide_leave_one_to_the_embedding_and_one_to_the_loss(
    layers: str, *, is_counted: bool
) -> None:
    run = run_of("dense_dgxc", model="llama3.1_405b", layers=layers, cp="2", vpp="8")
    megatron = keys(run, "zero")["megatron"]
    assert megatron["account_for_embedding_in_pipeline_split"] is is_counted
    assert megatron["account_for_loss_in_pipeline_split"] is is_counted


@pytest.mark.parametrize(
    ("cells", "impl"),
    [
        ({}, "local"),
        ({"gpu": "H100"}, None),
        ({"model": "LLAMA3_70B", "tp": "2"}, None),
        ({"precision": "NVFP4"}, None),
    ],
)
def test_only_recipes_of_8b_on_blackwell_capture_the_iteration(
    cells: dict[str, str], impl: str | None
) -> None:
    megatron = keys(run_of("dense_megatron_bridge", **cells), "zero")["megatron"]
    assert megatron.get("cuda_graph_impl") == impl


@pytest.mark.parametrize(
    ("precision", "float8", "float4", "overlaps"),
    [("FP8", "tensorwise", None, True), ("NVFP4", None, "nvfp4", False)],
)
def test_a_precision_sets_the_scaling_and_userbuffers_go_with_8_bits(
    precision: str, float8: str | None, float4: str | None, *, overlaps: bool
) -> None:
    run = run_of("dense_megatron_bridge", model="LLAMA3_70B", tp="2", precision=precision)
    train = keys(run, "train")
    assert (train.get("float8"), train.get("float4")) == (float8, float4)
    assert keys(run, "zero")["megatron"]["tp_comm_overlap"] is overlaps


@pytest.mark.parametrize(
    ("table", "cells", "why"),
    [
        ("dense_dgxc", {"gpu": "A100"}, "8 'A100' a node are not 8 H100"),
        ("dense_dgxc", {"precision": "FP16"}, "precision 'FP16' is not modelled"),
        ("dense_megatron_bridge", {"fsdp": "64"}, "Megatron-FSDP over 64 ranks is not modelled"),
        (
            "dense_megatron_bridge",
            {"task": "lora"},
            "task 'lora': packed samples, whose lengths are not published",
        ),
        ("dense_mlperf", {"gpu": "TPU-v5p"}, "TPU-v5p: TPUs are not modelled"),
        (
            "dense_mlperf",
            {"model": "llama2_70b_lora"},
            "llama2_70b_lora: packed samples, judged apart",
        ),
        (
            "dense_mlperf",
            {"config": "", "tp": ""},
            "no configuration is published: tensor, pipeline and micro-batch are unknown",
        ),
        ("dense_megatron_goldens", {"n_gpus": ""}, "the number of GPUs is not published"),
        ("dense_megatron_goldens", {"fsdp": "optim_grads"}, "Megatron-FSDP is not modelled"),
    ],
)
def test_a_row_that_is_not_judged_has_a_reason(table: str, cells: dict[str, str], why: str) -> None:
    assert run_of(table, **cells).reason == why


def test_a_shape_with_its_degrees_counts_once() -> None:
    other = {"tp": "4", "pp": "1"}
    again = {"test": "gpt/gpt3_mcore_te_tp2_pp2_more"}
    rows = [GOLDEN, {**GOLDEN, **again}, {**GOLDEN, **other}]
    first, second, third = TABLES["dense_megatron_goldens"].read(rows)
    assert (first.reason, third.reason) == ("", "")
    assert second.reason == "the settings of line 2 again"


def test_only_profiles_that_a_table_names_are_fitted_to_it() -> None:
    bridge, sweep = TABLES["dense_megatron_bridge"], TABLES["fsdp_mpt_training_runs"]
    assert bridge.fits("gb300")
    assert bridge.fits("gb200")
    assert not bridge.fits("b200")
    assert sweep.fits("a100")
    assert not TABLES["dense_mlperf"].fits("b200")


@pytest.mark.parametrize(
    ("cells", "mib"),
    [
        ({}, 96),
        ({"gpu": "A100"}, 68),
        ({"gpu": "A100", "test": "gpt/gpt3_mcore_te_tp2_pp2_cp2"}, 20.25),
        ({"gpu": "A100", "test": "gpt/gpt3_mcore_tp2_pp2"}, 64),
    ],
)
def test_a_golden_peak_counts_the_workspaces_of_cublas(cells: dict[str, str], mib: float) -> None:
    assert run_of("dense_megatron_goldens", **cells).library_bytes == round(mib * MIB)


def test_a_golden_peak_is_that_of_the_last_rank() -> None:
    """The first stage of four holds more micro-batches, and with plain attention more memory."""
    run = run_of("dense_megatron_goldens", tp="1", pp="4", gpu="A100")
    made = forecast(run.scenario, Quantity.MEMORY)
    assert isinstance(made, RunForecast)
    last = predicted(run, Quantity.MEMORY, made) - run.library_bytes
    assert 0 < last < made.peak_allocated_bytes
    largest = replace(run, of_last_rank=False)
    whole = predicted(largest, Quantity.MEMORY, made)
    assert whole == made.peak_allocated_bytes + run.library_bytes
    alone = run_of("dense_megatron_goldens", tp="1", pp="1", gpu="A100")
    made = forecast(alone.scenario, Quantity.MEMORY)
    assert isinstance(made, RunForecast)
    assert (
        predicted(alone, Quantity.MEMORY, made) == made.peak_allocated_bytes + alone.library_bytes
    )


def test_instances_of_the_optimizer_hold_its_states_once_each() -> None:
    test = "gpt/gpt3_mcore_te_tp2_pp1_resume_torch_dist_multi_dist_optimizer_instances"
    cells = {"test": test, "pp": "1", "dist_opt": "True"}
    parallel = keys(run_of("dense_megatron_goldens", **cells), "parallel")
    assert (parallel["data"], parallel["replicate"]) == (2, 2)


def test_peaks_of_adapters_count_what_the_libraries_of_the_trainer_hold() -> None:
    """The loop keeps a graph with inputs, so a run with 4-bit weights can need more memory."""
    peaks: dict[str, float] = {}
    for method in ("llama-3.2-1b/qlora.yaml", "llama-3.2-1b/lora.yaml"):
        run = run_of("memory_peaks", method=method)
        made = forecast(run.scenario, Quantity.MEMORY)
        assert isinstance(made, RunForecast)
        peaks[method] = predicted(run, Quantity.MEMORY, made)
    assert run_of("memory_peaks").peak_bytes == 5_530_000_000
    narrow, plain = peaks.values()
    assert narrow / 5.53e9 == pytest.approx(1, abs=0.08)
    assert narrow > plain - 2 * 1.2e9  # weights alone are 2 bytes smaller for each of 1.2e9


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"dataset": "axolotl"}, "dataset 'axolotl'"),
        ({"method": "llama-3.2-1b/full.yaml"}, "not a run with adapters"),
        ({"method": "gemma2b/qlora.yaml"}, "capped scores"),
        ({"hardware": "4xA10G"}, "sharding"),
        ({"peak_memory": "OOM"}, ""),
    ],
)
def test_rows_of_other_kinds_have_a_reason(cells: dict[str, str], why: str) -> None:
    run = run_of("memory_peaks", **cells)
    assert why in run.reason
    assert bool(run.reason) is bool(why)
    assert run.failed is (cells.get("peak_memory") == "OOM")
