"""Runs of H200, B200 and Megatron-LM, and of torchtitan by date: rows as scenarios."""

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.files.source import resolved
from zsim.scenario.tables import Scenario, from_tables
from zsim_lab.fit import b200_kernels
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES, RunTable

FSDP2 = {
    "model": "Llama 3 8B",
    "n_layers": "2",
    "d_model": "4096",
    "n_heads": "32",
    "n_kv_heads": "8",
    "ffn": "14336",
    "vocab": "128256",
    "precision": "bf16 param / fp32 reduce",
    "gpu": "H100 95GB",
    "dp_shard": "8",
    "tp": "1",
    "pp": "",
    "cp": "1",
    "technique": "FSDP2",
    "compile": "True",
    "seq_len_tokens": "8192",
    "local_batch_seqs": "1",
    "activation_checkpoint": "selective (op)",
    "reshard_after_forward": "",
    "peak_reserved_memory_GiB": "40",
    "step_time_s_derived": "1.0",
    "source": "github:pytorch/torchtitan commit message@d9bdfbb20695",
}
KEMPNER = {
    "model": "Llama-3-arch 7B",
    "gpu": "H200 141GB",
    "gpus_per_node": "4",
    "d_model": "4096",
    "n_layers": "2",
    "n_heads": "32",
    "n_kv_heads": "8",
    "fsdp": "2",
    "tp": "4",
    "pp": "1",
    "seq_len_tokens": "4096",
    "batch_size_per_dp_rank": "4",
    "grad_accum": "2",
    "precision": "bf16 mixed",
    "activation_checkpoint": "full",
    "torch_compile": "True",
    "tokens_per_s": "65536",
    "source": "a table",
}
SIMUMAX = {
    "dataset": "simumax_b200_real",
    "strategy": "llama3_70b_tp2_pp1_dp4_l12_mbc4_cef",
    "model": "llama3_70b truncated to 12 layers",
    "gpu": "B200",
    "seq_len_tokens": "not in name",
    "step_time_s": "0.5",
    "step_time_s_derived": "",
    "allocated_memory_GiB": "10",
    "source": "a table",
}
TORCHTITAN_TABLE = TABLES["fsdp2_llama_training_runs"]
VTRAIN = {
    "# GPUs": "8",
    "global batch": "32",
    "micro batch": "2",
    "hidden size": "1024",
    "attention heads": "16",
    "# layers": "16",
    "sequence length": "1024",
    "tensor parallelism": "2",
    "data parallelism": "2",
    "pipeline parallelism": "2",
    "iteration time (ms)": "250",
    "source": "a table",
}


def run_of(table: RunTable, row: dict[str, str], **cells: str) -> Published:
    (run,) = table.read([row | cells])
    return run


def scenario_of(run: Published) -> Scenario:
    assert not run.reason, run.reason
    scenario = from_tables(run.scenario)
    resolved("scenario", scenario)
    return scenario


def torchtitan(**cells: str) -> Scenario:
    return scenario_of(run_of(TORCHTITAN_TABLE, FSDP2, **cells))


def at(commit: str) -> str:
    return f"github:pytorch/torchtitan commit message@{commit}"


def test_a_run_of_torchtitan_has_the_software_of_its_day() -> None:
    late = torchtitan()
    assert (late.model.attention, late.compute.profile) == ("cudnn", "h100_hbm2e_2025")
    assert late.train.loss == "fused"
    september = torchtitan(source=at("d66b72a6ac57"))
    assert (september.model.attention, september.compute.profile) == ("flash2", "h100_hbm2e_2025")
    between = torchtitan(source=at("5940ddeb532c"))
    assert (between.model.attention, between.compute.profile) == ("flash2", "h100_hbm2e")
    assert (between.train.loss, between.train.holds_logits) == ("torch", False)
    early = torchtitan(source=at("83c879f18763"))
    assert (early.cluster.allocator, early.train.holds_logits) == ("caching", True)
    blackwell = torchtitan(source=at("d0ed9b4239e7"), gpu="B200 180GB")
    assert (blackwell.model.attention, blackwell.compute.profile) == ("cudnn", "b200")


def test_a_run_of_torchtitan_has_the_kernels_of_its_models_at_that_time() -> None:
    many = {"n_heads": "32", "n_kv_heads": "8"}
    until, since = (
        torchtitan(source=at(each), **many) for each in ("36a4b69426f4", "6a74d747c6d9")
    )
    repeats = [each.zero.model_dump()["fsdp2"].get("repeat_kv") for each in (until, since)]
    assert repeats == [True, None]
    alone = torchtitan(source=at("36a4b69426f4"), n_heads="32", n_kv_heads="32")
    assert "repeat_kv" not in alone.zero.model_dump()["fsdp2"]  # as many heads of keys
    assert until.model.qk_norm is None
    assert torchtitan(model="Qwen3 32B", **many).model.qk_norm == "head"


PAGE = "github:pytorch/torchtitan/benchmarks/{}.md@b5bcd76c66d0"


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("page", "day"),
    [
        ("llama3_h100_202412_torchtitan", "2024-12-01"),
        ("asyncTP_llama3_h100_2025-06_torchtitan", "2025-06-01"),
        ("llama3-8b_h200_202506_trainy-whitecloud", "2025-06-01"),
        ("llama3-70b-h100-202510-torchtitan", "2025-10-01"),
        ("llama3_h100_2025-10", "2025-10-01"),
        ("llama3_h100_2048_gpus", "2025-01-01"),
    ],
)
def test_the_day_of_a_page_is_the_month_in_its_name(page: str, day: str) -> None:
    late = {"technique": "chunked", "compile": "True"}
    model = torchtitan(source=PAGE.format(page), **late).model
    assert (model.attention == "cudnn") is (day >= "2025-10-09")
    profile = torchtitan(source=PAGE.format(page)).compute.profile
    assert profile == ("h100_hbm2e" if day < "2025-09-01" else "h100_hbm2e_2025")
    loss = torchtitan(source=PAGE.format(page)).train.loss
    assert loss == ("torch" if day < "2025-04-02" else "fused")


def test_what_is_not_simulated_of_a_run_keeps_it_from_fitting() -> None:
    assert not run_of(TORCHTITAN_TABLE, FSDP2).incomplete
    assert "keys and values" in run_of(TORCHTITAN_TABLE, FSDP2, cp="2", dp_shard="4").incomplete


def test_a_row_of_the_kempner_institute_has_its_throughput_and_its_trainer() -> None:
    run = run_of(TABLES["kempner_h200_fsdp"], KEMPNER)
    scenario = scenario_of(run)
    assert run.step_time_s == 2 * 4 * 2 * 4096 / 65_536
    assert scenario.model.intermediate_size == 14_336  # of Llama 3 8B, by the same rule
    assert scenario.cluster.nodes is None
    assert scenario.parallel.tensor == 4
    told = cast("dict[str, Any]", run.scenario)["zero"]["fsdp2"]
    assert told["input_gathers"] == "linear"
    assert told["reshard_root_after_forward"]
    assert told["replicate_embedding"]
    wide = run_of(TABLES["kempner_h200_fsdp"], KEMPNER, d_model="8192", n_heads="64")
    assert scenario_of(wide).model.intermediate_size == 28_672
    assert "not 4 H200" in run_of(TABLES["kempner_h200_fsdp"], KEMPNER, gpus_per_node="8").reason


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.integers(1, 4),
    layers=st.integers(1, 99),
    micro_batches=st.integers(1, 99),
)
def test_names_of_simumax_say_the_run_in_any_order(
    tensor: int, pipeline: int, data: int, layers: int, micro_batches: int
) -> None:
    parts = [f"tp{tensor}", f"pp{pipeline}", f"dp{data}", f"l{layers}", f"mbc{micro_batches}"]
    for some in (parts, parts[::-1]):
        run = run_of(
            TABLES["zero_fsdp_runs_misc"], SIMUMAX, strategy="_".join(["llama3_8b", *some, "cef"])
        )
        tables = cast("dict[str, Any]", run.scenario)
        assert tables["parallel"] == {"tensor": tensor, "pipeline": pipeline, "data": data}
        assert tables["model"]["layers"] == layers
        assert tables["train"]["gradient_accumulation_steps"] == micro_batches
    assert run.step_time_s == 0.5
    assert not run.reserved


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("deepseekv2_tp1_ep8_pp1_dp8_l4_mbc4_cef", "experts are not modelled"),
        ("llama3_70b_l12_tp1_cp8_pp1_dp1_seq32768_mbc4_cef", "all-to-all of context ranks"),
        ("llama3_70b_tp1_pp1_dp1_mbc4_cef", "no _l"),
    ],
)
def test_a_name_that_is_not_modelled_says_why(strategy: str, reason: str) -> None:
    assert reason in run_of(TABLES["zero_fsdp_runs_misc"], SIMUMAX, strategy=strategy).reason
    assert "no step time" in run_of(TABLES["zero_fsdp_runs_misc"], SIMUMAX, dataset="other").reason


def test_a_row_of_vtrain_is_megatron_with_its_micro_batches_and_padded_words() -> None:
    run = run_of(TABLES["vtrain_a100_single"], VTRAIN)
    scenario = scenario_of(run)
    assert (run.step_time_s, run.model, run.part) == (0.25, "1024 x 16", "pp > 1")
    assert scenario.train.gradient_accumulation_steps == 8
    assert scenario.model.vocab_size == 50_432  # 50,257, up to a multiple of 128 x 2
    assert scenario.zero.emulate == "megatron"
    for cells, reason in (
        ({"# GPUs": "4"}, "8 ranks on 4 GPUs"),
        ({"global batch": "33"}, "micro-batches of unequal size"),
    ):
        assert run_of(TABLES["vtrain_a100_single"], VTRAIN | cells).reason == reason


def test_products_of_a_b200_are_those_of_a_layer_each_way() -> None:
    rows = b200_kernels.kernel_rows()
    assert len(rows) == 3 * len(b200_kernels.LAYERS)
    assert {row.kernels[0].flops for row in rows[:3]} == {2 * 4096 * 10_240 * 8192}
    # Each layer ran at 39 to 66 % of the peak, which the times have to give back.
    rates = [row.kernels[0].flops / row.seconds / 2250e12 for row in rows]
    assert 0.39 < min(rates) < max(rates) < 0.66
