"""The sweep of the Ultra-Scale Playbook: rows as scenarios, and which should have fitted."""

import csv
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from zsim.analysis.summary import summary
from zsim.api.forecast import accumulating, first_that_fits, forecast
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.cli.main import answer
from zsim.files.source import resolved
from zsim.scenario.tables import from_tables
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.memory_fit import fit
from zsim_lab.verdict.training_verdict import predicted, verdict

TABLE = TABLES["zero01_tp_pp_training_runs"]

ROW = {
    "model_size": "8B",
    "n_layers_inferred": "2",
    "d_model_inferred": "256",
    "n_heads_inferred": "16",
    "n_kv_heads_inferred": "64 or 8",
    "ffn_inferred": "512",
    "vocab_inferred": "1024",
    "embeddings_inferred": "untied",
    "gpu": "H100 80GB",
    "seq_len_tokens": "4096",
    "micro_batch_seqs": "2",
    "grad_accum": "4",
    "global_batch_seqs": "32",
    "dp": "4",
    "pp": "1",
    "tp": "2",
    "zero_stage": "1",
    "status": "FOUND",
    "peak_gpu_memory_GB": "1.5",
    "step_time_s_derived": "0.25",
    "source": "a table",
}
FAILED = {
    "status": "FOUND_no_result(crash_or_OOM)",
    "peak_gpu_memory_GB": "",
    "step_time_s_derived": "",
}


def run_of(**cells: str) -> Published:
    (run,) = TABLE.read([ROW | cells])
    return run


def mode(tables: Mapping[str, object]) -> tuple[str, bool]:
    zero = cast("dict[str, Any]", tables["zero"])
    options = zero["nanotron"]
    return options["tp_mode"], options.get("tp_recompute_allgather", True)


def test_a_row_is_a_scenario_as_a_user_would_write_it() -> None:
    run = run_of()
    scenario = from_tables(run.scenario)
    assert (scenario.parallel.data, scenario.parallel.tensor, scenario.zero.stage) == (4, 2, 1)
    assert scenario.model.key_value_heads == 16  # unsure in the table, and 8 is what tensor 32 cuts
    assert run.peak_bytes == 3 * 2**29
    assert run.step_time_s == 0.25
    assert run.reserved
    assert not run.failed
    assert run_of(**FAILED).failed


def test_a_row_with_a_pipeline_has_its_stages_and_no_tied_embeddings() -> None:
    cells = {"pp": "2", "tp": "1", "embeddings_inferred": "untied when pp>1 (as FLOPs say)"}
    run = run_of(**cells)
    scenario = from_tables(run.scenario)
    assert (scenario.parallel.pipeline, scenario.model.tied_embeddings) == (2, False)
    assert (run.part, run_of().part) == ("pp > 1", "pp = 1")
    # Rows without a result are said to be tied: no FLOPs say otherwise.
    assert not from_tables(
        run_of(pp="2", embeddings_inferred="tied").scenario
    ).model.tied_embeddings
    assert from_tables(run_of(embeddings_inferred="tied").scenario).model.tied_embeddings


def test_rows_from_which_a_choice_of_the_reader_was_read_are_marked_as_fitted() -> None:
    of_one = {"model_size": "1B", "dp": "2", "tp": "1", "grad_accum": "8"}
    assert run_of(tp="16").fitted  # its mode of tensor ranks
    assert not run_of(tp="8").fitted
    assert run_of(**of_one, pp="4").fitted  # where a stage is full
    assert not run_of(**of_one, pp="2").fitted
    assert not run_of(**of_one | {"dp": "4", "grad_accum": "4"}, pp="4").fitted  # two nodes
    forecasts = [needing(2**30)] * 2
    told = verdict("a table", Quantity.MEMORY, [run_of(tp="16"), run_of()], forecasts, whole=True)
    assert [row.is_kept for row in told.rows] == [False, True]


def test_no_wait_of_the_host_is_set_for_a_pipeline_on_any_number_of_nodes() -> None:
    for cells in ({"dp": "4", "tp": "4"}, {"dp": "8", "tp": "32", "grad_accum": "2"}):
        compute = run_of(pp="2", **cells).scenario["compute"]
        assert compute == {"profile": "h100_2025"}


def test_stages_of_a_pipeline_keep_the_head_whole() -> None:
    for cells in ({"tp": "1"}, {"tp": "16"}, {"model_size": "1B"}):
        assert all(
            cast("dict[str, Any]", way["zero"])["nanotron"]["keep_head_whole"]
            for way in run_of(pp="2", **cells).alternatives
        )


@pytest.mark.one_commit_in(6)
def test_the_first_micro_batches_of_a_pipeline_say_what_all_of_them_take() -> None:
    run = run_of(
        pp="2", dp="1", tp="1", micro_batch_seqs="2", grad_accum="9", global_batch_seqs="18"
    )
    source = resolved("scenario", from_tables(run.scenario))
    whole = source.simulation().run(source.job(), seed=0)
    found = forecast(run.scenario)
    assert isinstance(found, RunForecast)
    # Between two simulations every time is whole picoseconds, and both forecasts are one of them.
    assert found.step_time_s == pytest.approx(whole.step_end_ps[-1] / 1e12, rel=1e-9)
    memory = forecast(run.scenario, Quantity.MEMORY)
    assert isinstance(memory, RunForecast)
    assert memory.peak_reserved_bytes == summary(source.job(), whole).peak_reserved_bytes


def test_tensor_parallelism_is_tried_as_the_sweep_did_the_lighter_way_later() -> None:
    kept, again = ("reduce_scatter", False), ("reduce_scatter", True)
    assert [mode(way) for way in run_of().alternatives] == [kept, again]
    small = run_of(model_size="1B")
    assert [mode(way) for way in small.alternatives] == [("all_reduce", True), kept, again]
    assert len(run_of(tp="1", dp="8", grad_accum="2").alternatives) == 1
    across, within = run_of(pp="2", tp="16"), run_of(pp="2", model_size="1B")
    assert [mode(way) for way in across.alternatives] == [again]
    assert [mode(way) for way in within.alternatives] == [kept, again]


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"grad_accum": "64"}, "dp x micro_batch_seqs x grad_accum is not global_batch_seqs"),
        ({"gpu": "B300"}, "gpu 'B300' is not one of h100 80 GB"),
        ({"zero_stage": "3"}, "zero_stage '3' is not one of 0, 1"),
    ],
)
def test_what_is_not_modelled_says_why(cells: dict[str, str], reason: str) -> None:
    run = run_of(**cells)
    assert (run.reason, run.alternatives) == (reason, ())


def test_what_the_trainer_does_not_begin_is_predicted_to_have_no_result() -> None:
    few = {"pp": "4", "dp": "1", "micro_batch_seqs": "16", "grad_accum": "2"}
    enough = run_of(**FAILED, pp="4", dp="1", micro_batch_seqs="8")
    begun_not = run_of(**FAILED, **few)
    assert begun_not.refusal == "nanotron begins no pipeline with fewer than 3 micro-batches"
    assert (begun_not.alternatives, enough.refusal) == ((), "")
    runs = [enough, begun_not]
    forecasts = [needing(99), None]
    found = fit("a table", runs, forecasts)
    assert found is not None
    assert (found.without, found.refused, found.not_begun) == (1, 1, 1)
    said = verdict("a table", Quantity.MEMORY, runs, forecasts)
    assert (said.total, said.modelled, said.unmodelled) == (2, 2, ())
    ran = verdict("a table", Quantity.MEMORY, [run_of(**few)], [None])
    assert [reason for _, reason in ran.unmodelled] == [begun_not.refusal]


def test_errors_of_pipelines_are_told_apart() -> None:
    runs = [run_of(), run_of(pp="2", grad_accum="4")]
    assert runs[0].sweep == runs[1].sweep
    judging = [replace(run, model="1B") for run in runs]
    assert all(run.judged for run in judging)
    said = verdict("a table", Quantity.MEMORY, judging, [needing(3 * 2**30), needing(2**30)])
    # Published are 3 * 2^29 bytes: twice as many, and two thirds of them.
    assert {name: each.median for name, each in said.groups()["parts"].items()} == {
        "pp = 1": pytest.approx(1.0),
        "pp > 1": pytest.approx(1 / 3),
    }


@pytest.mark.one_commit_in(9)
def test_the_first_way_that_fits_is_predicted() -> None:
    def with_memory(gib: float) -> list[dict[str, object]]:
        memory = {"node": "p5", "fabric": "fat_tree_2", "gpu_memory": f"{gib} GiB"}
        run = run_of(micro_batch_seqs="8", grad_accum="1")
        return [{**way, "cluster": memory} for way in run.alternatives]

    first, last = (forecast(way) for way in with_memory(80))
    assert isinstance(first, RunForecast)
    assert isinstance(last, RunForecast)
    assert last.peak_reserved_bytes < first.peak_reserved_bytes
    between = (first.peak_reserved_bytes + last.peak_reserved_bytes) / 2 / 2**30
    chosen = first_that_fits(with_memory(between))
    assert isinstance(chosen, RunForecast)
    assert chosen.fits
    assert chosen.peak_reserved_bytes == last.peak_reserved_bytes
    for asked in (Quantity.STEP_TIME, None):
        for memory, way, fits in ((80, 0, True), (between, 1, True), (0.01, 1, False)):
            found = first_that_fits(with_memory(memory), asked)
            assert isinstance(found, RunForecast)
            assert (found.alternative, found.fits) == (way, fits)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("micro_batches", [7, 9])
def test_whether_a_long_pipeline_fits_is_said_as_a_run_of_all_its_micro_batches_says_it(
    micro_batches: int,
) -> None:
    run = run_of(
        pp="8",
        dp="1",
        tp="1",
        n_layers_inferred="8",
        micro_batch_seqs="1",
        grad_accum=str(micro_batches),
        global_batch_seqs=str(micro_batches),
    )

    def with_memory(size_bytes: int) -> dict[str, object]:
        memory = f"{size_bytes / 2**20} MiB"
        cluster = {"node": "p5", "fabric": "fat_tree_2", "gpu_memory": memory}
        return {**run.scenario, "cluster": cluster}

    much = 40 * 2**30
    whole = forecast(with_memory(much), Quantity.MEMORY)
    one = forecast(accumulating(with_memory(much), 1), Quantity.MEMORY)
    assert isinstance(whole, RunForecast)
    assert isinstance(one, RunForecast)
    assert one.peak_allocated_bytes < whole.peak_allocated_bytes
    beside = much - whole.usable_bytes  # context and buffers of NCCL
    for usable, fits in (
        (whole.peak_reserved_bytes, True),
        ((one.peak_allocated_bytes + whole.peak_allocated_bytes) // 2, False),
        (one.peak_allocated_bytes // 2, False),
    ):
        found = forecast(with_memory(usable + beside), None)
        assert isinstance(found, RunForecast)
        assert found.fits is fits, usable


LIMIT = 100


def needing(size: int) -> RunForecast:
    """A forecast that needs so much of `LIMIT`."""
    return RunForecast(
        step_time_s=1.0,
        peak_allocated_bytes=size,
        peak_reserved_bytes=min(size, LIMIT),
        usable_bytes=LIMIT,
        fits=size <= LIMIT,
    )


def test_a_run_that_does_not_fit_needs_what_it_would_hold() -> None:
    assert predicted(run_of(), Quantity.MEMORY, needing(130)) == 130
    assert predicted(run_of(), Quantity.MEMORY, needing(70)) == 70


def test_rows_without_a_result_count_unless_a_harder_one_has_one() -> None:
    # Of the three that failed the last is no harder than the one that ran: a crash, or too slow.
    ran = run_of(micro_batch_seqs="2")
    failed = [
        run_of(**FAILED, micro_batch_seqs="4", grad_accum="2"),
        run_of(**FAILED, tp="1", dp="8", grad_accum="2"),
        run_of(**FAILED, tp="4", dp="4", micro_batch_seqs="1", grad_accum="8"),
    ]
    runs = [ran, *failed]
    found = fit("a table", runs, [needing(80), needing(96), needing(94), needing(10)])
    assert found is not None
    assert (found.without, found.refused, found.results, found.wrong) == (2, 1, 1, ())
    over = fit("a table", runs, [needing(111), *(needing(200) for _ in failed)])
    assert over is not None
    assert (over.refused, over.wrong) == (2, (ran,))


@pytest.mark.one_commit_in(6)
def test_memory_says_in_a_line_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ROW, ROW | FAILED | {"tp": "1", "dp": "8", "micro_batch_seqs": "4", "grad_accum": "1"}]
    with (tmp_path / f"{TABLE.file}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows([*rows, ROW | {"dp": "3"}])
    command = ["validate", "memory", "--data", str(tmp_path)]
    assert answer([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["files"][TABLE.file]
    assert (found["rows"], found["modelled"], len(found["unmodelled"])) == (3, 2, 1)
    assert found["fit"] == {
        "not_begun": 0,
        "without_result": 1,
        "predicted_not_to_fit": 0,
        "with_result": 1,
        "predicted_far_above_limit": 0,
        "rows_far_above_limit": [],
    }
    assert answer(command) == 0
    assert (
        "of 1 rows without a result that no successful row dominates 0 (0.0%) are "
        "predicted above the limit or within 5% of it; of 1 with one 0 (0.0%) are predicted more "
        "than 10% above it"
    ) in capsys.readouterr().out


def test_other_models_dominate_nothing_and_a_file_of_results_has_no_line() -> None:
    ran = replace(run_of(micro_batch_seqs="8", grad_accum="1"), model="other")
    failed = run_of(**FAILED)
    found = fit("a table", [ran, failed], [needing(10), needing(10)])
    assert found is not None
    assert found.without == 1
    assert fit("a table", [ran], [needing(10)]) is None
